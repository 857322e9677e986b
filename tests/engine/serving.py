"""Engines for tests: the real driver over real sockets, its stages as threads of this process (fast) or as processes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import yaml

from bimetal.engine.driver.driver import Driver
from bimetal.engine.stage.process import StageProcess
from bimetal.engine.wire.api import Generate, Output, SamplingParams
from bimetal.engine.wire.handshake import SECRET_VARIABLE
from bimetal.engine.wire.options import EngineOptions
from bimetal.plan import Plan, Replica, Stage, dump_plan

SECRET = "a secret of the tests"


def plan_document(
    model: Path | str,
    boundaries: Sequence[int],
    addresses: Sequence[str | None] | None = None,
    devices: Sequence[str] | None = None,
    **plan: Any,
) -> dict[str, Any]:
    """Stages of [b0, b1), [b1, b2), ... on this machine's CPU, unless `devices` says `gpu`."""
    spans = list(itertools.pairwise(boundaries))
    stages = tuple(
        Stage(
            f"node{i}",
            devices[i] if devices else "cpu",
            start,
            end,
            address=addresses[i] if addresses else None,
            num_threads=1,
        )
        for i, (start, end) in enumerate(spans)
    )
    settings = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 16, **plan}
    document = dump_plan(Plan(str(model), (Replica("replica", stages),), **settings))
    parsed: dict[str, Any] = yaml.safe_load(document)
    return parsed


@contextmanager
def threaded_engine(
    model: Path | str,
    boundaries: Sequence[int],
    *,
    devices: Sequence[str] | None = None,
    plan: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[Driver]:
    """A started driver whose stages run in this process; as processes of their own where several share the GPU runtime."""
    before = os.environ.get(SECRET_VARIABLE)
    os.environ[SECRET_VARIABLE] = SECRET
    in_threads = not devices or list(devices).count("gpu") < 2
    processes = [StageProcess("127.0.0.1:0", SECRET, lambda: None) for _ in boundaries[1:] if in_threads]
    for process in processes:
        Thread(target=process.run, daemon=True).start()
    document = plan_document(
        model, boundaries, [p.address for p in processes] or None, devices, **(plan or {})
    )
    driver = Driver(EngineOptions(plan=document, **options))
    try:
        driver.start()
        yield driver
    finally:
        driver.stop()
        for process in processes:
            process.close()
        if before is None:
            del os.environ[SECRET_VARIABLE]
        else:
            os.environ[SECRET_VARIABLE] = before


def greedy_params(max_tokens: int, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **changes})


def run_all(driver: Driver, requests: Sequence[Generate], timeout_s: float = 20.0) -> dict[str, list[Output]]:
    """Submit all, wait for all."""
    for request in requests:
        driver.submit(request)
    return collect(driver, {r.request_id for r in requests}, timeout_s)


def collect(driver: Driver, request_ids: set[str], timeout_s: float = 20.0) -> dict[str, list[Output]]:
    outputs: dict[str, list[Output]] = {request_id: [] for request_id in request_ids}
    unfinished = set(request_ids)
    waited_s = 0.0
    while unfinished:
        polled = driver.poll(1.0)
        assert polled is not None
        waited_s = 0.0 if polled else waited_s + 1.0
        assert waited_s < timeout_s, f"no output for {timeout_s} s: {sorted(unfinished)}"
        for output in polled:
            outputs[output.request_id].append(output)
            if output.finish_reason is not None:
                unfinished.discard(output.request_id)
    return outputs


def tokens_of(outputs: Sequence[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]
