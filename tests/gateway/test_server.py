"""The server as clients see it, in front of a scripted driver: formats, errors, queue, deadlines, failures."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer

from bimetal.gateway.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    ErrorBody,
    Health,
    ModelList,
)

from .scripted_driver import Order
from .servers import RunningServer, StartServer, server_starter, sse_events, wait_until

SENTENCE = "Paris is the capital of France."


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with server_starter(checkpoint, tmp_path_factory.mktemp("server")) as start:
        yield start(num_cached_tokens=2)


@pytest.fixture(scope="module")
def slow_server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with server_starter(checkpoint, tmp_path_factory.mktemp("slow-server")) as start:
        yield start(token_s=0.1)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text).ids


def error_of(response: httpx.Response, status: int, param: str | None = None) -> str:
    """The message, once status, shape and the field at fault are as expected."""
    assert response.status_code == status, response.text
    error = ErrorBody.model_validate(response.json()).error
    assert error.param == param, error
    return error.message


# -- answers --------------------------------------------------------------------------------------------------------


def test_completion(server: RunningServer, tokenizer: Tokenizer) -> None:
    answer = Completion.model_validate(server.complete(SENTENCE).json())
    assert answer.choices[0].text == SENTENCE
    assert answer.choices[0].finish_reason == "stop"
    num = len(ids(tokenizer, SENTENCE))
    assert answer.usage.model_dump() == {
        "prompt_tokens": num,
        "completion_tokens": num,
        "total_tokens": 2 * num,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_streamed_completion_is_the_same_text(server: RunningServer) -> None:
    response = server.complete("é ü 😀 end", stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [Completion.model_validate(event) for event in sse_events(response.text)]
    assert "".join(choice.text for event in events for choice in event.choices) == "é ü 😀 end"
    assert [event.choices[0].finish_reason for event in events[:-1]][-1] == "stop"
    assert events[-1].choices == []
    assert events[-1].usage.completion_tokens > 0
    assert all(event.usage is None for event in events[:-1])


def test_chat(server: RunningServer) -> None:
    answer = ChatCompletion.model_validate(server.chat("hello").json())
    assert answer.choices[0].message.content == "user\nhello\nassistant\n"
    assert answer.choices[0].finish_reason == "stop"


def test_streamed_chat(server: RunningServer) -> None:
    response = server.chat("hello", stream=True, logprobs=True, top_logprobs=2)
    chunks = [ChatCompletionChunk.model_validate(event) for event in sse_events(response.text)]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "user\nhello\nassistant\n"
    scored = [
        token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content
    ]
    shown = b"".join(bytes(token.bytes) for token in scored).decode()
    assert shown == "<start>user\nhello<end>\n<start>assistant\n"


def test_several_prompts_and_choices(server: RunningServer, tokenizer: Tokenizer) -> None:
    answer = server.complete([ids(tokenizer, "fox"), ids(tokenizer, "dog")], n=2, seed=5).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "fox"),
        (1, "fox"),
        (2, "dog"),
        (3, "dog"),
    ]
    told = server.told("Generate")[-4:]
    assert [one["sampling"]["seed"] for one in told] == [5, 6, 5, 6]
    assert [one["request_id"].rsplit("-", 1)[1] for one in told] == ["0", "1", "2", "3"]
    # Each prompt counts once: that its second choice finds the first one's blocks is no news.
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


def test_stop_strings_cut_the_text_and_abort(server: RunningServer, tokenizer: Tokenizer) -> None:
    endless = [*ids(tokenizer, "the quick"), Order.FOREVER, *ids(tokenizer, "x")]
    response = server.complete(endless, max_tokens=200, stop=["xxxx", "never"])
    choice = response.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("the quick", "stop", "xxxx")
    last = server.told("Generate")[-1]["request_id"]
    wait_until(lambda: [last] in [one["request_ids"] for one in server.told("Abort")])


def test_streamed_stop_string_never_shows(server: RunningServer) -> None:
    events = sse_events(server.complete(SENTENCE, stop="capital", stream=True).text)
    assert "".join(event["choices"][0]["text"] for event in events) == "Paris is the "
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_stop_string_after_min_tokens_only(server: RunningServer, tokenizer: Tokenizer) -> None:
    text = "dog dog dog"
    assert server.complete(text, stop="dog").json()["choices"][0]["text"] == ""
    past_first = len(ids(tokenizer, "dog"))
    answer = server.complete(text, stop="dog", min_tokens=past_first).json()
    assert answer["choices"][0]["text"] == "dog "


def test_stop_string_may_be_included(server: RunningServer) -> None:
    answer = server.complete(SENTENCE, stop=" capital", include_stop_str_in_output=True).json()
    assert answer["choices"][0]["text"] == "Paris is the capital"


def test_stop_token(server: RunningServer, tokenizer: Tokenizer) -> None:
    dot = ids(tokenizer, ";")[0]
    choice = server.complete("fox; dog", stop_token_ids=[dot]).json()["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("fox", dot)


def test_length(server: RunningServer, tokenizer: Tokenizer) -> None:
    choice = server.complete("dog fox", max_tokens=1).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["text"] == tokenizer.decode(ids(tokenizer, "dog fox")[:1])


def test_completion_logprobs_and_echo(server: RunningServer, tokenizer: Tokenizer) -> None:
    text = "é 😀"
    num = len(ids(tokenizer, text))
    choice = Completion.model_validate(server.complete(text, echo=True, logprobs=2).json()).choices[0]
    assert choice.text == text * 2
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(logprobs.text_offset) == len(logprobs.top_logprobs) == 2 * num
    assert logprobs.token_logprobs == [None] + [-0.5] * (2 * num - 1)
    assert logprobs.top_logprobs[0] is None
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    assert logprobs.text_offset[num] == len(text)


def test_echo_without_tokens_scores_the_prompt(server: RunningServer) -> None:
    answer = server.complete("fox", echo=True, logprobs=0, max_tokens=0).json()
    assert answer["choices"][0]["text"] == "fox"
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["choices"][0]["logprobs"]["token_logprobs"][0] is None
    assert server.told("Generate")[-1]["sampling"]["prompt_logprobs"] == 0


def test_streamed_logprobs_are_the_whole_ones(server: RunningServer) -> None:
    fields = {"echo": True, "logprobs": 1, "stop": "capital"}
    whole = server.complete(SENTENCE, **fields).json()["choices"][0]
    events = sse_events(server.complete(SENTENCE, stream=True, **fields).text)
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [v for choice in choices if choice["logprobs"] for v in choice["logprobs"][name]] == whole[
            "logprobs"
        ][name]


def test_sampling_defaults_come_from_the_checkpoint(server: RunningServer) -> None:
    server.complete("fox")
    sampling = server.told("Generate")[-1]["sampling"]
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (0.25, 0.5, 7)
    server.complete("fox", temperature=0, top_p=1, top_k=-1)
    sampling = server.told("Generate")[-1]["sampling"]
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (0, 1, 0)


def test_every_field_reaches_the_driver(server: RunningServer) -> None:
    fields = {
        "min_p": 0.1,
        "seed": 3,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {"5": -100},
        "min_tokens": 1,
        "ignore_eos": True,
        "stop_token_ids": [299],
    }
    server.complete("fox", deadline_s=9, cache_salt="salt", **fields)
    told = server.told("Generate")[-1]
    assert {name: told["sampling"][name] for name in fields} == fields
    assert told["cache_salt"] == "salt"
    assert 8 < told["deadline_s"] <= 9


def test_fields_without_bearing_are_accepted(server: RunningServer) -> None:
    ignored = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "suffix": "",
        "best_of": 1,
    }
    assert server.complete("fox", **ignored).status_code == 200


def test_models_health_and_metrics(server: RunningServer) -> None:
    models = ModelList.model_validate(server.get("/v1/models").json())
    assert [model.id for model in models.data] == ["scripted"]
    assert models.data[0].max_model_len == 1024
    assert server.get("/v1/models/scripted").json()["id"] == "scripted"
    Health.model_validate(server.get("/health").json())
    before = server.metric("bimetal_output_tokens_total")
    server.complete("fox")
    assert server.metric("bimetal_output_tokens_total") > before
    for name in ("time_to_first_token", "inter_token_latency", "time_per_output_token", "request_duration"):
        assert server.metric(f"bimetal_{name}_seconds_count") > 0
    assert server.metric("bimetal_kv_cache_used_ratio") == 0.25
    assert server.metric("bimetal_prefix_cache_hit_tokens_total") == 30
    assert server.metric("bimetal_stage_busy_ratio") == 1.25


# -- bad input ------------------------------------------------------------------------------------------------------

BAD_FIELDS = [
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": 4096}, "max_tokens"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"seed": 2**63}, "seed"),
    ({"stop": [""]}, "stop.0"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": 5}, "stop"),
    ({"logprobs": 21}, "logprobs"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"300": 1}}, "logit_bias"),
    ({"stop_token_ids": [300]}, "stop_token_ids"),
    ({"best_of": 3}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"unheard_of": 1}, "unheard_of"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "zebra"}},
            }
        },
        "response_format.json_schema.schema",
    ),
    ({"guided_regex": "("}, "guided_regex"),
    ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
    ({"guided_grammar": "start: <no_such_token>"}, "guided_grammar"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"deadline_s": 0}, "deadline_s"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["fox", ""]}, "prompt.1"),
    ({"prompt": None}, "prompt"),
    ({"prompt": [[]]}, "prompt.0"),
    ({"prompt": [300]}, "prompt"),
    ({"prompt": [-1]}, "prompt.0"),
    ({"prompt": [[1], [2, 300]]}, "prompt.1"),
    ({"prompt": [9] * 1024}, "prompt"),
    ({"prompt": "fox " * 50000}, "prompt"),
    ({"model": "other"}, "model"),
    ({"model": 5}, "model"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS, ids=[json.dumps(bad[0])[:60] for bad in BAD_FIELDS])
def test_a_bad_field_is_named_and_never_reaches_the_driver(
    server: RunningServer, fields: dict, param: str
) -> None:
    before = len(server.told("Generate"))
    body = {"model": "scripted", "prompt": "fox", "max_tokens": 10, **fields}
    message = error_of(
        server.post("/v1/completions", body),
        404 if param == "model" and body["model"] == "other" else 400,
        param,
    )
    assert param in message
    assert len(server.told("Generate")) == before


BAD_CHAT = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0.type",
    ),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"functions": []}, "functions"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 1024}, "max_completion_tokens"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools.0.function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools.1.function.name"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "zebra"}}}],
            "tool_choice": "required",
        },
        "tools.0.function.parameters",
    ),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": {"type": "function", "function": {"name": "g"}},
        },
        "tool_choice.function.name",
    ),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHAT, ids=[json.dumps(bad[0])[:60] for bad in BAD_CHAT])
def test_a_bad_chat_field_is_named(server: RunningServer, fields: dict, param: str) -> None:
    body = {"model": "scripted", "messages": [{"role": "user", "content": "x"}], **fields}
    assert param in error_of(server.post("/v1/chat/completions", body), 400, param)


BAD_BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b'{"model": NaN}',
    b'{"model": "scripted", "prompt": "\\ud800"}',
    b'{"model": "scripted", "prompt": "fox", "temperature": Infinity}',
    b'{"model": "scripted", "prompt": "fox", "temperature": 1e999}',
    b'{"model": "scripted", "prompt": "fox", "seed": ' + b"9" * 5000 + b"}",
    b'{"model": "scripted", "prompt": ' + b"[" * 100_000,
    b'{"model": "scripted", "guided_json": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
    b"\xff\xfe",
]


@pytest.mark.parametrize("body", BAD_BODIES, ids=[str(body[:40]) for body in BAD_BODIES])
def test_a_bad_body_is_a_400(server: RunningServer, body: bytes) -> None:
    response = httpx.post(
        f"{server.url}/v1/completions", content=body, headers={"Content-Type": "application/json"}, timeout=20
    )
    assert response.status_code == 400
    ErrorBody.model_validate(response.json())


def test_paths_methods_and_media_types(server: RunningServer) -> None:
    assert "/v1/nothing" in error_of(server.get("/v1/nothing"), 404)
    response = server.get("/v1/completions")
    assert "POST" in error_of(response, 405)
    assert response.headers["allow"] == "POST"
    form = httpx.post(f"{server.url}/v1/completions", data={"prompt": "fox"}, timeout=20)
    assert "application/json" in error_of(form, 415)
    assert error_of(server.get("/v1/models/other"), 404, "model")


def test_bad_deadline_header(server: RunningServer) -> None:
    for value in ("0", "-1", "soon", "nan", "1e9"):
        response = server.post(
            "/v1/completions", {"model": "scripted", "prompt": "fox"}, headers={"X-Request-Deadline-S": value}
        )
        error_of(response, 400, "X-Request-Deadline-S")


def test_keys_and_body_limit(start_server: StartServer) -> None:
    server = start_server(gateway={"api_keys": ["sesame"], "max_body_bytes": 2000})
    good = {"headers": {"Authorization": "Bearer sesame"}}
    response = server.get("/v1/models")
    error_of(response, 401)
    assert response.headers["www-authenticate"] == "Bearer"
    error_of(server.get("/v1/models", headers={"Authorization": "Bearer wrong"}), 401)
    error_of(server.complete("fox"), 401)
    assert server.get("/v1/models", **good).status_code == 200
    assert server.get("/health").status_code == 200
    body = {"model": "scripted", "prompt": "fox " * 1000}
    assert "2.0 kB" in error_of(server.post("/v1/completions", body, **good), 413)
    assert server.post("/v1/completions", {**body, "prompt": "fox"}, **good).status_code == 200


# -- load, deadlines, clients that leave ----------------------------------------------------------------------------


def test_small_answers_are_not_held_back(server: RunningServer) -> None:
    """Without TCP_NODELAY an answer of two pieces waits 40 ms for the client's acknowledgement of the first."""
    times_s = []
    with httpx.Client(timeout=20) as client:
        for _ in range(30):
            began_s = time.monotonic()
            assert client.get(f"{server.url}/v1/models").status_code == 200
            times_s.append(time.monotonic() - began_s)
    assert sorted(times_s)[10] < 0.03


def test_queue_is_bounded(start_server: StartServer, tokenizer: Tokenizer) -> None:
    server = start_server(gateway={"max_queue": 2}, max_num_seqs=1, token_s=0.05)
    endless = [Order.FOREVER, ids(tokenizer, "x")[0]]

    async def ask_all() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=30) as client:
            body = {"model": "scripted", "prompt": endless, "max_tokens": 10}
            return await asyncio.gather(
                *(client.post(f"{server.url}/v1/completions", json=body) for _ in range(6))
            )

    answers = asyncio.run(ask_all())
    assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 429, 429, 429]
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    error_of(refused, 429)
    assert server.complete("fox").status_code == 200
    error_of(server.complete("fox", n=4), 400, "n")


def test_deadline_before_anything_is_a_504(slow_server: RunningServer, tokenizer: Tokenizer) -> None:
    server = slow_server
    endless = [Order.FOREVER, ids(tokenizer, "x")[0]]
    assert "deadline" in error_of(server.complete(endless, deadline_s=0.05), 504)
    assert "deadline" in error_of(server.complete(endless, deadline_s=0.35), 504)
    assert "deadline" in error_of(server.complete(endless, deadline_s=0.05, stream=True), 504)
    response = server.post(
        "/v1/completions", {"model": "scripted", "prompt": endless}, headers={"X-Request-Deadline-S": "0.05"}
    )
    error_of(response, 504)
    streamed = sse_events(server.complete(endless, deadline_s=0.35, stream=True).text)
    assert len(streamed) > 1
    assert streamed[-1]["error"]["code"] == "deadline"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts(slow_server: RunningServer, tokenizer: Tokenizer, stream: bool) -> None:
    server, before = slow_server, len(slow_server.told("Abort"))
    body = {
        "model": "scripted",
        "prompt": [Order.FOREVER, ids(tokenizer, "x")[0]],
        "max_tokens": 200,
        "stream": stream,
        "n": 2,
    }
    if stream:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=5) as response:
            next(response.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.5)
    wait_until(lambda: len(server.told("Abort")) > before)
    assert len(server.told("Abort")[-1]["request_ids"]) == 2
    wait_until(lambda: server.metric("bimetal_sequences_running") == 0)


# -- failures -------------------------------------------------------------------------------------------------------


def test_one_failed_request_leaves_the_others(server: RunningServer) -> None:
    assert "scripted error" in error_of(server.complete([Order.ERROR]), 500)
    events = sse_events(server.complete([20, 21, Order.ERROR], stream=True).text)
    assert "scripted error" in events[-1]["error"]["message"]
    assert server.complete("fox").status_code == 200


@pytest.mark.parametrize(
    ("order", "why"), [(Order.DIE, "status 3"), (Order.FATAL, "scripted failure"), (Order.NONSENSE, "wire")]
)
def test_a_dead_driver_ends_the_server_with_its_message(
    start_server: StartServer, tokenizer: Tokenizer, order: Order, why: str
) -> None:
    server = start_server(token_s=0.02)
    endless = {
        "model": "scripted",
        "prompt": [Order.FOREVER, *ids(tokenizer, "x")],
        "stream": True,
        "max_tokens": 900,
    }
    with httpx.stream("POST", f"{server.url}/v1/completions", json=endless, timeout=20) as response:
        lines = response.iter_lines()
        next(lines)
        assert why in error_of(server.complete([order]), 500)
        assert "stopped" in error_of(server.get("/health"), 503)
        events = sse_events("\n\n".join(line for line in lines if line) + "\n\n")
    assert why in events[-1]["error"]["message"]
    assert server.process.wait(6) != 0
    assert why in server.process.stderr.read()


def test_health_while_loading(start_server: StartServer) -> None:
    server = start_server(load_s=1.0, wait=False)
    wait_until(lambda: _status(server, "/health") is not None)
    assert _status(server, "/health") == 503
    error_of(server.complete("fox"), 503)
    error_of(server.get("/v1/models"), 503)
    server.wait_until_ready()
    assert server.complete("fox").status_code == 200


def _status(server: RunningServer, path: str) -> int | None:
    try:
        return server.get(path).status_code
    except httpx.TransportError:
        return None


@pytest.mark.parametrize(("number", "stubborn"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_a_signal_stops_everything_within_five_seconds(
    start_server: StartServer, tokenizer: Tokenizer, number: signal.Signals, stubborn: bool
) -> None:
    server = start_server(token_s=0.02, ignore_end=stubborn)
    body = {
        "model": "scripted",
        "prompt": [Order.FOREVER, ids(tokenizer, "x")[0]],
        "max_tokens": 200,
        "stream": True,
    }
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=20) as response:
        lines = response.iter_lines()
        next(lines)
        began_s = time.monotonic()
        server.process.send_signal(number)
        assert "shutting down" in "".join(lines)
    assert server.process.wait(6) == 0
    assert time.monotonic() - began_s < 5


def test_a_driver_that_does_not_start_is_an_error(start_server: StartServer) -> None:
    for command in ([sys.executable, "-c", "raise SystemExit(7)"], ["/no/such/program"]):
        server = start_server(command=command, wait=False)
        assert server.process.wait(10) != 0
        said = server.process.stderr.read()
        assert "status 7" in said or "/no/such/program" in said


def test_a_checkpoint_without_tokenizer_is_an_error(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server(model_path=str(tmp_path), wait=False)
    assert server.process.wait(10) != 0
    assert "tokenizer.json" in server.process.stderr.read()


def test_a_driver_without_the_secret_is_refused(start_server: StartServer, checkpoint: object) -> None:
    command = [
        sys.executable,
        str(__file__).replace("test_server.py", "scripted_driver.py"),
        "--secret",
        "guess",
    ]
    server = start_server(command=command, wait=False)
    assert server.process.wait(10) != 0
    assert "secret differs" in server.process.stderr.read()


def test_a_taken_port_is_an_error(server: RunningServer, checkpoint: object) -> None:
    from bimetal.errors import ConfigError
    from bimetal.gateway.server import bind

    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="--port"):
        bind("127.0.0.1", taken.getsockname()[1])
