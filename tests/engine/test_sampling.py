"""Sampling through the engine: against transformers' distributions, and the same whatever shares the batch."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.engine.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.engine.serving import collect, greedy_params, run_all, threaded_engine, tokens_of
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from bimetal.engine.driver.driver import Driver
from bimetal.engine.wire.api import Generate, Output, SamplingParams

PROMPT = tuple(range(5, 25))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def driver(folder: Path) -> Iterator[Driver]:
    with threaded_engine(folder, (0, 1, 4), max_num_batched_tokens=16) as driver:
        yield driver


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def logits_of(reference: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    """[len, V] float32."""
    logits: torch.Tensor = reference(torch.tensor([tokens])).logits[0].float()
    return logits


def generate(driver: Driver, sampling: SamplingParams, prompt: tuple[int, ...] = PROMPT) -> list[Output]:
    return run_all(driver, [Generate("it", prompt, sampling)])["it"]


def test_logprobs_and_ranks_are_transformers(driver: Driver, reference: Any) -> None:
    outputs = generate(driver, greedy_params(8, logprobs=4))
    tokens = tokens_of(outputs)
    expected = torch.log_softmax(logits_of(reference, (*PROMPT, *tokens)), -1)
    for i, output in enumerate(outputs):
        (logprob,) = output.logprobs
        row = expected[len(PROMPT) - 1 + i]
        assert logprob.logprob == pytest.approx(float(row[tokens[i]]), abs=2e-4)
        assert logprob.rank == 1
        assert list(logprob.top_ids) == row.topk(4).indices.tolist()
        assert list(logprob.top_logprobs) == pytest.approx(row.topk(4).values.tolist(), abs=2e-4)


def test_prompt_logprobs_over_several_chunks(driver: Driver, reference: Any) -> None:
    prompt = tuple(int(t) for t in np.random.default_rng(3).integers(2, VOCAB_SIZE, 45))
    outputs = generate(driver, greedy_params(3, prompt_logprobs=2), prompt)
    found = outputs[0].prompt_logprobs
    assert found is not None
    expected = torch.log_softmax(logits_of(reference, prompt), -1)
    assert [p.logprob for p in found] == pytest.approx(
        [float(expected[i, prompt[i + 1]]) for i in range(len(prompt) - 1)], abs=2e-4
    )
    assert all(o.prompt_logprobs is None for o in outputs[1:])


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.8, "temperature": 1.7},
        {"repetition_penalty": 1.8, "temperature": 0.8},
        {"logit_bias": {7: 6.0, 300: -100.0}},
    ],
)
def test_samples_follow_the_distribution(driver: Driver, reference: Any, change: dict[str, Any]) -> None:
    """800 seeds' first tokens against the exact distribution, by total variation and by support."""
    sampling = {"temperature": 1.0, "max_tokens": 1, **change}
    requests = [Generate(str(i), PROMPT, SamplingParams(seed=i, **sampling)) for i in range(800)]
    outputs = run_all(driver, requests)
    drawn = np.bincount([tokens_of(o)[0] for o in outputs.values() if tokens_of(o)], minlength=VOCAB_SIZE)
    expected = _distribution(logits_of(reference, PROMPT)[-1], sampling)
    assert drawn[expected < 1e-9].sum() == 0, "a token was drawn that the filters exclude"
    distance = 0.5 * np.abs(drawn / drawn.sum() - expected).sum()
    noise = (
        0.5 * np.sqrt(2 / np.pi * expected * (1 - expected) / 800).sum()
    )  # its expectation under the distribution
    assert distance < 1.6 * noise + 0.02


def _distribution(logits: torch.Tensor, sampling: dict[str, Any]) -> np.ndarray:
    """By transformers' own processors where it has them."""
    scores = logits.clone().unsqueeze(0)
    if "repetition_penalty" in sampling:
        scores = RepetitionPenaltyLogitsProcessor(sampling["repetition_penalty"])(
            torch.tensor([PROMPT]), scores
        )
    for token, value in sampling.get("logit_bias", {}).items():
        scores[0, token] += value
    scores = scores / sampling["temperature"]
    if "top_k" in sampling:
        scores = transformers.TopKLogitsWarper(sampling["top_k"])(None, scores)
    if "top_p" in sampling:
        scores = transformers.TopPLogitsWarper(sampling["top_p"])(None, scores)
    if "min_p" in sampling:
        scores = transformers.MinPLogitsWarper(sampling["min_p"])(None, scores)
    found: np.ndarray = torch.softmax(scores[0], -1).numpy()
    return found


def test_a_seed_gives_the_same_tokens_in_any_company(driver: Driver) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=1.3, top_p=0.95, seed=42, ignore_eos=True)
    alone = tokens_of(generate(driver, sampling))
    requests = [Generate("it", PROMPT, sampling)]
    requests += [Generate(f"other{i}", (i + 2,) * (i + 1), greedy_params(5 + i)) for i in range(9)]
    assert tokens_of(run_all(driver, requests)["it"]) == alone
    assert (
        tokens_of(
            generate(
                driver, SamplingParams(max_tokens=12, temperature=1.3, top_p=0.95, seed=43, ignore_eos=True)
            )
        )
        != alone
    )


def test_penalties_count_tokens_still_in_flight(driver: Driver, reference: Any) -> None:
    """Greedy under presence and frequency penalties, token by token against the definition."""
    tokens = tokens_of(generate(driver, greedy_params(20, presence_penalty=1.5, frequency_penalty=0.7)))
    context = list(PROMPT)
    for token in tokens:
        row = logits_of(reference, tuple(context))[-1]
        counts = torch.bincount(torch.tensor(context[len(PROMPT) :], dtype=torch.long), minlength=VOCAB_SIZE)
        row = row - 1.5 * (counts > 0) - 0.7 * counts
        assert row.max() - row[token] < 1e-3
        context.append(token)


def test_min_tokens_holds_the_end_back(driver: Driver) -> None:
    first = tokens_of(generate(driver, greedy_params(1)))[0]
    ended = generate(driver, SamplingParams(max_tokens=5, temperature=0.0, stop_token_ids=(first,)))
    assert [(o.finish_reason, o.stop_token_id) for o in ended] == [("stop", first)]
    assert tokens_of(ended) == []
    held = tokens_of(
        generate(driver, SamplingParams(max_tokens=5, min_tokens=3, temperature=0.0, stop_token_ids=(first,)))
    )
    assert len(held) >= 3
    assert first not in held[:3]


def test_abort_stops_and_frees(driver: Driver) -> None:
    driver.submit(Generate("long", PROMPT, greedy_params(200)))
    while not driver.poll(1.0):
        pass
    driver.abort(("long", "never heard of"))
    run_all(driver, [Generate("next", (9, 9), greedy_params(4))])
    assert driver.stats().num_running == 0
    assert driver.stats().kv_used_ratio == 0.0


def test_a_grammar_holds_at_every_token(folder: Path) -> None:
    """A regular expression over a byte tokenizer, unsplit and split, with steps running ahead of the ids."""
    _write_byte_tokenizer(folder)
    grammar = json.dumps({"grammars": [{"lark_grammar": "start: /[ab]{3}-[0-9]{2}/"}]})
    for boundaries in ((0, 4), (0, 2, 4)):
        with threaded_engine(folder, boundaries) as driver:
            requests = [
                Generate(
                    str(i), PROMPT, SamplingParams(max_tokens=20, temperature=1.0, seed=i, grammar=grammar)
                )
                for i in range(4)
            ]
            requests.append(Generate("free", PROMPT, greedy_params(20)))
            outputs = run_all(driver, requests)
            for i in range(4):
                text = "".join(chr(t - 2) for t in tokens_of(outputs[str(i)]))
                assert len(text) == 6, text
                assert set(text[:3]) <= set("ab"), text
                assert text[3] == "-"
                assert text[4:].isdigit()
                assert outputs[str(i)][-1].finish_reason == "stop"
            assert len(tokens_of(outputs["free"])) == 20


def _write_byte_tokenizer(folder: Path) -> None:
    """Ids 2 to 257 are the bytes; 1 ends."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    vocabulary = {"<s>": 0, "</s>": 1, **{letters[b]: b + 2 for b in range(256)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 1e-40},
        {"temperature": 1e-38, "top_k": 5, "top_p": 0.5, "min_p": 0.5},
        {"repetition_penalty": 1e-300},
        {"logit_bias": dict.fromkeys(range(VOCAB_SIZE), -float("inf"))},
    ],
)
def test_numbers_that_overflow_give_tokens_all_the_same(driver: Driver, change: dict[str, Any]) -> None:
    sampling = {"max_tokens": 4, "seed": 1, "ignore_eos": True, **change}
    tokens = tokens_of(generate(driver, SamplingParams(**sampling)))
    assert len(tokens) == 4
    assert all(0 <= token < VOCAB_SIZE for token in tokens)
    if "temperature" in change:
        assert tokens == tokens_of(generate(driver, greedy_params(4)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_ends_before_the_minimum_length(folder: Path, temperature: float) -> None:
    _write_byte_tokenizer(folder)
    grammar = json.dumps({"grammars": [{"lark_grammar": "start: /[ab]{3}/"}]})
    with threaded_engine(folder, (0, 2, 4)) as driver:
        sampling = SamplingParams(
            max_tokens=20, min_tokens=10, temperature=temperature, seed=1, grammar=grammar
        )
        outputs = generate(driver, sampling)
    text = "".join(chr(t - 2) for t in tokens_of(outputs))
    assert len(text) == 3
    assert set(text) <= set("ab")
    assert outputs[-1].finish_reason == "stop"


def test_a_bad_grammar_is_an_error_of_its_request(folder: Path) -> None:
    _write_byte_tokenizer(folder)
    with threaded_engine(folder, (0, 4)) as driver:
        driver.submit(Generate("bad", PROMPT, SamplingParams(grammar="{")))
        outputs = collect(driver, {"bad"})["bad"]
        assert outputs[-1].finish_reason == "error"
        assert "grammar" in str(outputs[-1].message)
        assert len(tokens_of(run_all(driver, [Generate("good", PROMPT, greedy_params(3))])["good"])) == 3


def test_grammars_may_start_while_others_wait_for_ids(folder: Path) -> None:
    """A mask that is known at once is sent before those of earlier steps that depend on ids in flight."""
    _write_byte_tokenizer(folder)
    grammar = json.dumps({"grammars": [{"lark_grammar": "start: /[ab]{12}-[0-9]{8}/"}]})
    with threaded_engine(folder, (0, 1, 2, 4)) as driver:
        outputs: dict[str, list[Output]] = {str(i): [] for i in range(16)}
        for i in range(16):
            sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=i, grammar=grammar)
            driver.submit(Generate(str(i), PROMPT[: i + 1], sampling))
            # Let those before it get a few tokens further.
            for output in itertools.chain(driver.poll(1.0) or (), driver.poll(1.0) or ()):
                outputs[output.request_id].append(output)
        unfinished = {k for k, o in outputs.items() if not o or o[-1].finish_reason is None}
        for request_id, rest in collect(driver, unfinished).items():
            outputs[request_id] += rest
    for found in outputs.values():
        text = "".join(chr(t - 2) for t in tokens_of(found))
        assert len(text) == 21, text
        assert found[-1].finish_reason == "stop"
