"""The official `openai` client against `bimetal serve`: a real model over two CPU stages of unlike size."""

from __future__ import annotations

import json
import math
import time

import openai
import pytest

from .servers import RunningServer, wait_until

pytestmark = pytest.mark.slow

MODEL = "SmolLM2-135M-Instruct"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client(demo_server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="sesame", max_retries=0, timeout=60)


# -- answers --------------------------------------------------------------------------------------------------------


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=40)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 7


def test_content_in_parts_and_a_history(client: openai.OpenAI) -> None:
    messages = [
        {"role": "developer", "content": "Answer in one sentence."},
        {"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]},
    ]
    first = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_completion_tokens=30
    )
    messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "And of Italy?"}]
    second = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_completion_tokens=30
    )
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
    assert second.choices[0].message.content


def test_streaming_gives_the_same_text_and_the_usage(client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "messages": FRANCE, "temperature": 0, "max_tokens": 40}
    chunks = list(
        client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **fields)
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "The capital of France is Paris."
    assert len(chunks) > 5
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 7
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_completion_streaming(client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 24}
    whole = client.completions.create(**fields)
    chunks = list(client.completions.create(stream=True, **fields))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 24


def test_prompts_as_text_as_ids_and_several(client: openai.OpenAI, demo_server: RunningServer) -> None:
    from tokenizers import Tokenizer

    from .servers import demo_model

    tokenizer = Tokenizer.from_file(str(demo_model() / "tokenizer.json"))
    texts = ["The capital of France is", "The sky is"]
    token_ids = [tokenizer.encode(text).ids for text in texts]
    fields = {"model": MODEL, "temperature": 0, "max_tokens": 6}
    as_text = client.completions.create(prompt=texts, **fields)
    as_ids = client.completions.create(prompt=token_ids, **fields)
    alone = [
        client.completions.create(prompt=one, **fields).choices[0].text for one in (texts[0], token_ids[1])
    ]
    assert [choice.text for choice in as_text.choices] == [choice.text for choice in as_ids.choices] == alone
    assert [choice.index for choice in as_text.choices] == [0, 1]
    assert "Paris" in alone[0]


def test_stop(client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "messages": FRANCE, "temperature": 0, "max_tokens": 40}
    answer = client.chat.completions.create(stop=["of France", "never"], **fields)
    assert answer.choices[0].message.content == "The capital "
    assert answer.choices[0].finish_reason == "stop"
    chunks = client.chat.completions.create(stop="is Paris", stream=True, **fields)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "The capital of France "


def test_vllm_fields(client: openai.OpenAI) -> None:
    extra = {"ignore_eos": True, "min_tokens": 20, "top_k": 1, "min_p": 0.0, "repetition_penalty": 1.0}
    answer = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0.7, max_tokens=20, extra_body=extra
    )
    assert answer.usage.completion_tokens == 20
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content.startswith("The capital of France is Paris.")
    extra = {"stop_token_ids": [30]}
    answer = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=20, extra_body=extra
    )
    assert answer.choices[0].message.content == "The capital of France is Paris"


def test_logit_bias_and_penalties(client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "messages": FRANCE, "temperature": 0, "max_tokens": 12}
    first = client.chat.completions.create(logprobs=True, **fields).choices[0]
    # Forbid the token " Paris" that the model would choose.
    banned = client.chat.completions.create(logit_bias={"7042": -100}, **fields).choices[0]
    assert "Paris" in first.message.content
    assert "Paris" not in banned.message.content
    penalised = client.chat.completions.create(frequency_penalty=2, presence_penalty=2, **fields).choices[0]
    assert penalised.message.content


def test_chat_logprobs(client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "messages": FRANCE, "temperature": 0, "max_tokens": 40, "logprobs": True}
    choice = client.chat.completions.create(top_logprobs=3, **fields).choices[0]
    content = choice.logprobs.content
    assert "".join(token.token for token in content) == choice.message.content
    assert b"".join(bytes(token.bytes) for token in content).decode() == choice.message.content
    for token in content:
        assert len(token.top_logprobs) == 3
        assert (
            token.logprob == token.top_logprobs[0].logprob == max(top.logprob for top in token.top_logprobs)
        )
        assert token.token == token.top_logprobs[0].token
        assert sum(math.exp(top.logprob) for top in token.top_logprobs) <= 1 + 1e-4
    chunks = list(client.chat.completions.create(stream=True, top_logprobs=3, **fields))
    streamed = [t for chunk in chunks if chunk.choices[0].logprobs for t in chunk.choices[0].logprobs.content]
    assert [token.token for token in streamed] == [token.token for token in content]
    # Two runs may sum in another order, for they share steps with other requests.
    assert [token.logprob for token in streamed] == pytest.approx(
        [token.logprob for token in content], abs=1e-3
    )
    none = client.chat.completions.create(**fields).choices[0].logprobs.content
    assert all(token.top_logprobs == [] for token in none)


def test_completion_logprobs_and_echo(client: openai.OpenAI) -> None:
    prompt = "The capital of France is"
    answer = client.completions.create(
        model=MODEL, prompt=prompt, temperature=0, max_tokens=3, logprobs=2, echo=True
    )
    choice = answer.choices[0]
    assert choice.text.startswith(prompt)
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert [
        choice.text[at : at + len(token)]
        for at, token in zip(logprobs.text_offset, logprobs.tokens, strict=True)
    ] == logprobs.tokens
    assert logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])
    assert len(logprobs.tokens) == answer.usage.total_tokens
    scored = client.completions.create(
        model=MODEL, prompt=prompt + " Paris", max_tokens=0, logprobs=1, echo=True
    )
    assert scored.usage.completion_tokens == 0
    # What was generated greedily scores the same when given.
    assert scored.choices[0].logprobs.token_logprobs == pytest.approx(
        logprobs.token_logprobs[: len(scored.choices[0].logprobs.tokens)], abs=1e-3, nan_ok=True
    )


def test_n_and_seed(client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "prompt": "My favourite animal is", "max_tokens": 6, "temperature": 1.0}
    fields["extra_body"] = {"ignore_eos": True}
    first = client.completions.create(n=3, seed=11, **fields)
    again = client.completions.create(n=3, seed=11, **fields)
    other = client.completions.create(n=3, seed=500, **fields)
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) > 1
    assert [choice.text for choice in again.choices] == texts
    assert [choice.text for choice in other.choices] != texts
    assert first.usage.completion_tokens == 18
    # Choice i has the seed of a request for one choice with seed + i.
    assert client.completions.create(n=1, seed=13, **fields).choices[0].text == texts[2]


def test_streamed_choices_carry_their_index(client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "prompt": "My favourite animal is", "max_tokens": 8, "seed": 11, "n": 3}
    whole = client.completions.create(**fields)
    texts = ["", "", ""]
    for chunk in client.completions.create(stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_prefix_cache_hits_are_in_the_usage(client: openai.OpenAI) -> None:
    long = "Count: " + " ".join(map(str, range(150)))
    fields = {"model": MODEL, "prompt": long, "max_tokens": 1, "temperature": 0}
    client.completions.create(**fields)
    cached = client.completions.create(**fields).usage.prompt_tokens_details.cached_tokens
    assert cached > 100
    salted = client.completions.create(extra_body={"cache_salt": "another tenant"}, **fields)
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


# -- structured output and tools ------------------------------------------------------------------------------------


def test_json_object(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Say hello."}],
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=24,
    ).choices[0]
    assert choice.message.content.startswith("{")
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


def test_json_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "population": {"type": "integer", "maximum": 10**8, "minimum": 0},
        },
        "required": ["city", "population"],
        "additionalProperties": False,
    }
    for stream in (False, True):
        answer = client.chat.completions.create(
            model=MODEL,
            messages=FRANCE,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "city", "schema": schema, "strict": True},
            },
            max_tokens=120,
            temperature=0.8,
            seed=3,
            stream=stream,
        )
        text = (
            "".join(chunk.choices[0].delta.content or "" for chunk in answer)
            if stream
            else answer.choices[0].message.content
        )
        document = json.loads(text)
        assert set(document) == {"city", "population"}
        assert isinstance(document["population"], int)


def test_regex_and_choice(client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "messages": FRANCE, "max_tokens": 30, "seed": 5}
    for extra in (
        {"guided_regex": "[0-9]{3}-[a-z]{2}"},
        {"structured_outputs": {"regex": "[0-9]{3}-[a-z]{2}"}},
    ):
        text = client.chat.completions.create(extra_body=extra, **fields).choices[0].message.content
        assert text[:3].isdigit()
        assert text[3] == "-"
        assert len(text) == 6
    extra = {"structured_outputs": {"choice": ["Rome", "Paris/Lutetia"]}}
    assert client.chat.completions.create(extra_body=extra, **fields).choices[0].message.content in (
        "Rome",
        "Paris/Lutetia",
    )


@pytest.mark.parametrize(
    ("choice", "stream"),
    [("required", False), ({"type": "function", "function": {"name": "get_weather"}}, True)],
)
def test_forced_tool_call(client: openai.OpenAI, choice: str | dict, stream: bool) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[WEATHER],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=150,
        temperature=0,
        stream=stream,
    )
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
        content = "".join(chunk.delta.content or "" for chunk in chunks)
        finish = chunks[-1].finish_reason
        assert [call.index for call in calls] == [0]
    else:
        message = answer.choices[0].message
        calls, content, finish = message.tool_calls, message.content or "", answer.choices[0].finish_reason
    assert finish == "tool_calls"
    assert content == ""
    assert calls[0].function.name == "get_weather"
    arguments = json.loads(calls[0].function.arguments)
    assert arguments["unit"] in ("C", "F")
    assert isinstance(arguments["city"], str)


def test_a_conversation_with_tools_goes_on(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    fields = {"model": MODEL, "tools": [WEATHER], "temperature": 0, "max_tokens": 40}
    forced = client.chat.completions.create(
        messages=messages, tool_choice="required", parallel_tool_calls=False, **fields
    )
    message = forced.choices[0].message
    messages += [
        message.model_dump(),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "21 C"},
    ]
    assert (
        client.chat.completions.create(messages=messages, tool_choice="none", **fields)
        .choices[0]
        .message.content
    )
    assert (
        client.chat.completions.create(messages=messages, tool_choice="auto", **fields)
        .choices[0]
        .finish_reason
    )


# -- errors ---------------------------------------------------------------------------------------------------------


def refused(kind: type[openai.APIStatusError], param: str | None, call: object, **fields: object) -> str:
    with pytest.raises(kind) as caught:
        call(**fields)
    assert caught.value.param == param
    assert param is None or param in caught.value.message
    return caught.value.message


def test_bad_requests(client: openai.OpenAI) -> None:
    complete, chat = client.completions.create, client.chat.completions.create
    bad, prompt = openai.BadRequestError, {"model": MODEL, "prompt": "x"}
    refused(openai.NotFoundError, "model", complete, model="gpt-4", prompt="x")
    refused(openai.NotFoundError, "model", chat, model="gpt-4", messages=FRANCE)
    refused(bad, "max_tokens", complete, max_tokens=-1, **prompt)
    refused(bad, "max_tokens", complete, max_tokens="many", **prompt)
    refused(bad, "max_tokens", complete, max_tokens=5000, **prompt)
    refused(bad, "temperature", complete, temperature=3, **prompt)
    refused(bad, "n", complete, n=0, **prompt)
    refused(bad, "best_of", complete, best_of=3, **prompt)
    refused(bad, "suffix", complete, suffix="end", **prompt)
    refused(bad, "prompt", complete, model=MODEL, prompt="")
    refused(bad, "prompt", complete, model=MODEL, prompt="word " * 3000)
    refused(bad, "prompt", complete, model=MODEL, prompt=[49152])
    refused(bad, "messages", chat, model=MODEL, messages=[])
    refused(
        bad,
        "messages.0.content.0.type",
        chat,
        model=MODEL,
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    )
    refused(bad, "top_logprobs", chat, model=MODEL, messages=FRANCE, top_logprobs=2)
    refused(
        bad,
        "response_format.json_schema.schema",
        chat,
        model=MODEL,
        messages=FRANCE,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "zebra"}}},
    )
    refused(bad, "modalities", chat, model=MODEL, messages=FRANCE, modalities=["audio"])


def test_wrong_key_long_body_and_unknown_path(client: openai.OpenAI, demo_server: RunningServer) -> None:
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="guess").models.list()
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model=MODEL, prompt="x" * 250_000, max_tokens=1)
    assert caught.value.status_code == 413
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="x")


def test_deadline(client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "prompt": "Once", "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(extra_headers={"X-Request-Deadline-S": "0.3"}, **fields)
    assert caught.value.status_code == 504
    with pytest.raises(openai.APIError, match="deadline"):
        list(
            client.completions.create(
                stream=True, **{**fields, "extra_body": {"ignore_eos": True, "deadline_s": 0.5}}
            )
        )


def test_leaving_frees_the_engine(client: openai.OpenAI, demo_server: RunningServer) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="Once", max_tokens=1500, n=3, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert demo_server.metric("bimetal_sequences_running") == 3
    stream.close()
    wait_until(lambda: demo_server.metric("bimetal_sequences_running") == 0)
    # The engine's own report comes once a second: its blocks are free again.
    wait_until(lambda: demo_server.metric("bimetal_kv_cache_used_ratio") == 0, 5)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).completions.create(
            model=MODEL, prompt="Once", max_tokens=1500, extra_body={"ignore_eos": True}
        )
    wait_until(lambda: demo_server.metric("bimetal_sequences_running") == 0)
    began_s = time.monotonic()
    assert client.completions.create(model=MODEL, prompt="Hello", max_tokens=4).choices[0].text
    assert time.monotonic() - began_s < 5
