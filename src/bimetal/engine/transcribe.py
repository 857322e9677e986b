"""Running prompts through a placement for `bimetal agree`: greedy continuations, and scores of given tokens. Torch-free.

Scores are log-probabilities of prompt tokens, so that both placements are asked about exactly the same tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from bimetal.engine.agreement import Transcript
from bimetal.engine.driver.driver import Driver
from bimetal.engine.wire.api import Generate, Output, SamplingParams, TokenLogprob
from bimetal.errors import ConfigError, EngineError

Prompt = tuple[int, ...]

_RANDOM_PROMPT_TOKENS = (4, 8, 12, 17, 23, 31, 40, 64)


def builtin_prompts() -> list[str]:
    """A few kinds of text: prose, code, lists, numbers, other languages."""
    text = (resources.files("bimetal.engine") / "data" / "agree_prompts.txt").read_text(encoding="utf-8")
    return _lines(text)


def read_prompts(file: Path) -> list[str]:
    """One a line, in which \\n stands for a line break; empty lines do not count."""
    try:
        prompts = _lines(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}: give a text file with one prompt a line") from error
    if not prompts:
        raise ConfigError(f"{file}: holds no prompt: write one a line")
    return prompts


def _lines(text: str) -> list[str]:
    return [line.replace("\\n", "\n") for line in text.splitlines() if line.strip()]


def tokenize(folder: Path, prompts: Sequence[str]) -> list[Prompt] | None:
    """Token ids as the checkpoint's own tokenizer makes them; None where it has no tokenizer.json."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    encoded = [tuple(tokenizer.encode(prompt).ids) for prompt in prompts]
    for prompt, ids in zip(prompts, encoded, strict=True):
        if len(ids) < 2:
            raise ConfigError(
                f"prompt {prompt!r} is {len(ids)} tokens, but at least 2 are needed: lengthen it"
            )
    return encoded


def random_prompts(vocab_size: int, seed: int) -> list[Prompt]:
    """For models without text: several lengths, the same ones every time."""
    rng = random.Random(seed)
    return [tuple(rng.randrange(vocab_size) for _ in range(n)) for n in _RANDOM_PROMPT_TOKENS]


def transcribe(
    driver: Driver, prompts: Sequence[Prompt], texts: Sequence[Prompt], num_tokens: int, num_top: int
) -> list[Transcript]:
    """Of a started driver. `texts`: the prompts with A's continuations; empty: this is A, whose own they are."""
    greedy = continue_greedily(driver, prompts, num_tokens)
    if not texts:
        texts = [prompt + after for prompt, after in zip(prompts, greedy, strict=True)]
    scores = score(driver, texts, num_top)
    return [Transcript(*each) for each in zip(greedy, scores, strict=True)]


def continue_greedily(driver: Driver, prompts: Sequence[Prompt], num_tokens: int) -> list[tuple[int, ...]]:
    """`num_tokens` tokens after each prompt, end-of-sequence tokens included."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    outputs = _run(driver, [Generate(f"greedy-{i}", p, sampling) for i, p in enumerate(prompts)])
    return [tuple(token for output in each for token in output.token_ids) for each in outputs]


def score(driver: Driver, texts: Sequence[Prompt], num_top: int) -> list[tuple[TokenLogprob, ...]]:
    """Of each text, every token's but the first, with the `num_top` most probable ones in its place."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=num_top)
    outputs = _run(driver, [Generate(f"score-{i}", t, sampling) for i, t in enumerate(texts)])
    return [next(o.prompt_logprobs for o in each if o.prompt_logprobs is not None) for each in outputs]


def _run(driver: Driver, requests: Sequence[Generate]) -> list[list[Output]]:
    """All outputs of each request, in their order."""
    outputs: dict[str, list[Output]] = {request.request_id: [] for request in requests}
    for request in requests:
        driver.submit(request)
    num_finished = 0
    while num_finished < len(requests):
        for output in driver.poll(1.0) or ():
            if output.finish_reason == "error":
                raise EngineError(f"the engine refused {output.request_id}: {output.message}")
            outputs[output.request_id].append(output)
            num_finished += output.finish_reason is not None
    return list(outputs.values())
