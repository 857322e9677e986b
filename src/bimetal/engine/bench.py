"""Offline measurement on the very driver, scheduler, link and sampler that `serve` uses: random prompts in, figures out.

All requests of a workload arrive at once and run to their full length. Torch-free.
"""

from __future__ import annotations

import random
import re
import secrets
import time
from dataclasses import dataclass

import numpy as np

from bimetal.engine.driver.driver import Driver
from bimetal.engine.wire.api import Generate, SamplingParams
from bimetal.errors import ConfigError

_STATS_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Workload:
    num_requests: int
    input_tokens: int
    output_tokens: int

    def __str__(self) -> str:
        return f"{self.num_requests}:{self.input_tokens}:{self.output_tokens}"


def parse_workload(text: str) -> Workload:
    """REQUESTS:INPUT:OUTPUT.

    >>> parse_workload("8:64:32")
    Workload(num_requests=8, input_tokens=64, output_tokens=32)
    """
    parts = text.split(":")
    if len(parts) != 3 or not all(re.fullmatch("[0-9]{1,9}", p) and int(p) > 0 for p in parts):
        raise ConfigError(
            f"workload {text!r} is not REQUESTS:INPUT:OUTPUT in positive numbers, such as 8:64:32"
        )
    return Workload(*(int(p) for p in parts))


@dataclass(frozen=True, slots=True)
class Percentiles:
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class DecodeWindow:
    """While every request of the workload decodes: from the last first token to the first last one.

    boundary_s = round_s - max(K * slowest stage's step, sum of the stages' steps): what the boundaries add to a round, in
    which every request gets a token.
    """

    num_micro_batches: int
    round_s: float
    stage_step_s: tuple[float, ...]
    stage_busy_ratio: tuple[float, ...]
    mean_context: float
    """Tokens of a sequence in the cache, on average over sequences and time."""

    @property
    def boundary_s(self) -> float:
        return self.round_s - max(self.num_micro_batches * max(self.stage_step_s), sum(self.stage_step_s))


@dataclass(frozen=True, slots=True)
class Result:
    workload: str
    duration_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_s: Percentiles
    tpot_s: Percentiles
    num_preemptions: int
    decode: DecodeWindow | None
    """None: some request ended before the last one began."""


@dataclass(slots=True)
class _Times:
    """Of one request, by the clock of `poll`."""

    submitted_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0


@dataclass(slots=True)
class _Window:
    began_s: float = 0.0
    ended_s: float = 0.0
    num_micro_batches: int = 1
    tokens_began: int = 0
    tokens_ended: int = 0
    """Of all requests' outputs."""


def check_fits(driver: Driver, workload: Workload) -> None:
    if workload.input_tokens + workload.output_tokens > driver.max_model_len:
        raise ConfigError(
            f"workload {workload} needs {workload.input_tokens + workload.output_tokens} tokens a request, but "
            f"max_model_len is {driver.max_model_len}: raise --max-model-len"
        )


def run_workload(driver: Driver, workload: Workload, seed: int, *, with_window: bool = True) -> Result:
    """Submit everything, wait for everything. The driver must be idle before, and is after.

    Without the decode window, stages are asked for no statistics on the way, which would end a profile.
    """
    check_fits(driver, workload)
    rng = random.Random(seed)
    salt = secrets.token_hex(8)  # nothing that an earlier run left in the cache counts
    vocab_size = driver.spec.vocab_size
    sampling = SamplingParams(max_tokens=workload.output_tokens, temperature=0.0, ignore_eos=True)
    preemptions = driver.scheduler.counters.num_preemptions
    requests = [
        Generate(
            f"bench-{i}",
            tuple(rng.randrange(vocab_size) for _ in range(workload.input_tokens)),
            sampling,
            cache_salt=salt,
        )
        for i in range(workload.num_requests)
    ]
    began_s = time.perf_counter()
    times = {}
    for request in requests:
        times[request.request_id] = _Times(began_s)
        driver.submit(request)
    window = _Window()
    num_started = num_finished = 0
    while num_finished < len(requests):
        outputs = driver.poll(1.0)
        now_s = time.perf_counter()
        for output in outputs or ():
            if output.finish_reason == "error":
                raise ConfigError(f"the engine refused a request of workload {workload}: {output.message}")
            mine = times[output.request_id]
            if output.token_ids:
                if not mine.num_tokens:
                    mine.first_s = now_s
                    num_started += 1
                mine.num_tokens += len(output.token_ids)
                mine.last_s = now_s
            num_finished += output.finish_reason is not None
        if with_window and num_started == len(requests) and not window.began_s and not num_finished:
            driver.ask_stage_stats()
            window.began_s = now_s
            window.num_micro_batches = driver.scheduler.num_micro_batches
            window.tokens_began = sum(t.num_tokens for t in times.values())
        if num_finished and window.began_s and not window.ended_s:
            window.ended_s = now_s
            window.tokens_ended = sum(t.num_tokens for t in times.values())
            driver.ask_stage_stats()
    duration_s = max(t.last_s for t in times.values()) - began_s
    output_tokens = sum(t.num_tokens for t in times.values())
    return Result(
        workload=str(workload),
        duration_s=duration_s,
        output_tokens_per_s=output_tokens / duration_s,
        total_tokens_per_s=(output_tokens + workload.num_requests * workload.input_tokens) / duration_s,
        ttft_s=_percentiles([t.first_s - t.submitted_s for t in times.values()]),
        tpot_s=_percentiles([(t.last_s - t.first_s) / max(t.num_tokens - 1, 1) for t in times.values()]),
        num_preemptions=driver.scheduler.counters.num_preemptions - preemptions,
        decode=_decode_window(driver, window, workload),
    )


def _decode_window(driver: Driver, window: _Window, workload: Workload) -> DecodeWindow | None:
    if not window.ended_s:
        return None
    while (stats := driver.stage_stats) is None:
        driver.poll(_STATS_POLL_S)
    # By tokens that came, not by steps issued: those run ahead at its start, and no more at its end.
    num_rounds = (window.tokens_ended - window.tokens_began) / workload.num_requests
    if num_rounds <= 0 or any(s.num_steps == 0 for s in stats):
        return None
    elapsed_s = window.ended_s - window.began_s
    return DecodeWindow(
        num_micro_batches=window.num_micro_batches,
        round_s=elapsed_s / num_rounds,
        stage_step_s=tuple(s.busy_s / s.num_steps for s in stats),
        stage_busy_ratio=tuple(min(s.busy_s / elapsed_s, 1.0) for s in stats),
        mean_context=workload.input_tokens
        + (window.tokens_began + window.tokens_ended) / 2 / workload.num_requests,
    )


def _percentiles(values: list[float]) -> Percentiles:
    return Percentiles(*(float(v) for v in np.percentile(values, [50, 90, 99])))
