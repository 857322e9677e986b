"""A trace through the replicas of a plan.

Owns the merging of arrivals and replicas' clocks, and what is reported. The routing decision is `policy.routing`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bimetal.errors import ConfigError
from bimetal.policy.routing import choose_replica
from bimetal.simulate.pipeline import SimulatedPipeline
from bimetal.simulate.replica import SimulatedReplica
from bimetal.simulate.shapes import ReplicaShape
from bimetal.simulate.trace import Floats, Ints, Trace

PERCENTILES = (50, 95, 99)
LEAST_KV_TOKENS = 2
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Slo:
    """Of one class of requests; None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class Simulation:
    """Per request and per replica, in seconds."""

    trace: Trace
    replica: Ints
    ttft_s: Floats
    tpot_s: Floats
    """NaN for answers of one token."""
    done_s: Floats
    makespan_s: float
    busy_s: tuple[tuple[float, ...], ...]
    """[replica][stage]."""
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class ClassResult:
    """One class of requests, or all."""

    name: str
    num_requests: int
    ttft_s: Mapping[int, float]
    """By percentile."""
    tpot_s: Mapping[int, float]
    output_tokens_per_s: float
    goodput_tokens_per_s: float
    """Output tokens of requests that met their SLO."""
    met_ratio: float


def simulate(trace: Trace, shapes: Sequence[ReplicaShape], weights: Sequence[float]) -> Simulation:
    """Every request through the replica that the policy chooses. Exact and deterministic: the trace holds the randomness.

    ConfigError for an empty trace, or a replica whose cache has no room for a prompt of one token and its answer.
    """
    size = len(trace)
    if not size:
        raise ConfigError("the trace has no requests: give at least one")
    for i, shape in enumerate(shapes):
        if shape.kv_tokens < LEAST_KV_TOKENS:
            raise ConfigError(
                f"replica {i}: its cache holds {shape.kv_tokens} tokens, and a prompt with its answer has at least "
                f"{LEAST_KV_TOKENS}: give its smallest stage more memory or fewer layers"
            )
    first, done = np.full(size, np.nan), np.full(size, np.nan)
    replicas = [
        (SimulatedPipeline if len(shape.clocks) > 1 else SimulatedReplica)(shape, first, done)
        for shape in shapes
    ]
    speeds = np.array(weights, dtype=np.float64)
    in_flight = np.zeros(len(replicas), dtype=np.int64)
    due = np.full(len(replicas), np.inf)
    chosen = np.zeros(size, dtype=np.int64)
    arrivals, inputs, outputs = (
        trace.arrival_s.tolist(),
        trace.input_tokens.tolist(),
        trace.output_tokens.tolist(),
    )
    for i, at_s in enumerate(arrivals):
        for r in np.flatnonzero(due <= at_s).tolist():
            replicas[r].advance(at_s)
            due[r], in_flight[r] = replicas[r].next_change_s, replicas[r].num_unfinished
        r = choose_replica(in_flight, speeds)
        replicas[r].advance(at_s)
        replicas[r].submit(i, inputs[i], outputs[i], at_s)
        chosen[i], due[r], in_flight[r] = r, replicas[r].next_change_s, replicas[r].num_unfinished
    for replica in replicas:
        replica.advance(np.inf)
    rest = np.maximum(trace.output_tokens - 1, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        tpot = np.where(rest > 0, (done - first) / rest, np.nan)
    return Simulation(
        trace=trace,
        replica=chosen,
        ttft_s=first - trace.arrival_s,
        tpot_s=tpot,
        done_s=done,
        makespan_s=float(np.nanmax(done)),
        busy_s=tuple(tuple(replica.busy_s) for replica in replicas),
        num_preemptions=sum(replica.num_preemptions for replica in replicas),
    )


def class_results(run: Simulation, slos: Mapping[str, Slo]) -> list[ClassResult]:
    """Per class of the trace, and `all` of them if there are several."""
    trace = run.trace
    index = np.zeros(len(trace), dtype=np.int64) if trace.class_index is None else trace.class_index
    met = np.ones(len(trace), dtype=bool)
    for number, name in enumerate(trace.classes):
        slo, members = slos.get(name, Slo()), index == number
        if slo.ttft_s is not None:
            met &= ~members | (run.ttft_s <= slo.ttft_s)
        if slo.tpot_s is not None:
            met &= ~members | np.isnan(run.tpot_s) | (run.tpot_s <= slo.tpot_s)
    groups = [(name, index == number) for number, name in enumerate(trace.classes)]
    if len(groups) > 1:
        groups.append(("all", np.ones(len(trace), dtype=bool)))
    return [_class_result(run, name, members, met) for name, members in groups if members.any()]


def _class_result(run: Simulation, name: str, members: Mask, met: Mask) -> ClassResult:
    tokens = run.trace.output_tokens
    tpot = run.tpot_s[members]
    tpot = tpot[~np.isnan(tpot)]
    return ClassResult(
        name=name,
        num_requests=int(members.sum()),
        ttft_s={p: float(np.percentile(run.ttft_s[members], p)) for p in PERCENTILES},
        tpot_s={p: float(np.percentile(tpot, p)) if len(tpot) else 0.0 for p in PERCENTILES},
        output_tokens_per_s=float(tokens[members].sum() / run.makespan_s),
        goodput_tokens_per_s=float(tokens[members & met].sum() / run.makespan_s),
        met_ratio=float(met[members].mean()),
    )
