"""A chosen fleet under its own traffic, on modelled time.

Owns which requests each group of replicas is given and how much of them is simulated. Each group gets its share of each class
at random, and inside a group the router's policy decides. Time is the simulator's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bimetal.planner.evaluate import Evaluator
from bimetal.planner.templates import Template
from bimetal.planner.traffic import Traffic
from bimetal.simulate.run import simulate
from bimetal.simulate.trace import Floats, Trace, merge

MOST_REPLICAS = 4
"""Of a group, simulated: a larger group is steadier, so that this errs to the slow side."""
LEAST_REQUESTS = 2000
"""In a run of classes without a trace."""
LEAST_ANSWERS = 5.0
"""Such a run lasts at least so many times as long as an answer may take: a fleet that falls behind by 2% has a queue of a tenth of
an answer's time by then, and in a run of a few seconds would look as if it kept up."""
SLOW_TPOT_S = 0.1
"""Taken for the time of an answer where no stricter limit is asked for."""
LEAST_SEEN = 300
"""Requests of a class with limits that a run has, so that its 99th percentile is no luck of a few; the run is longer for that."""
MOST_SPED_UP = 0.02
"""Of the others' tokens: what a class of still fewer requests may bring more than it would, to be seen more often."""
WARM_UP = 0.1
"""Of the time, not counted: replicas start empty."""


@dataclass(frozen=True, slots=True)
class Group:
    """Equal replicas."""

    template: Template
    number: int
    served_per_s: Mapping[str, float]
    """By class: requests that all of them together are given."""


@dataclass(frozen=True, slots=True)
class ClassReplay:
    """What clients of one class see, in seconds and requests per second."""

    name: str
    num_requests: int
    ttft_s: Mapping[int, float]
    """By percentile."""
    tpot_s: Mapping[int, float]
    met_ratio: float
    """Of requests within both limits."""
    goodput_tokens_per_s: float


PERCENTILES = (50, 95, 99)


def replay(
    groups: Sequence[Group],
    evaluators: Mapping[str, Evaluator],
    traffic: Sequence[Traffic],
    seed: int,
    draw: int = 0,
    lost: Mapping[str, float] | None = None,
) -> list[ClassReplay]:
    """Per class that sends requests; `evaluators` by model. `draw`: which of many runs of equal chances.

    `lost`: by class, of what is asked, what routing between unlike replicas costs: every group bears that much more.
    """
    seen: dict[str, list[tuple[Floats, Floats, float]]] = {t.name: [] for t in traffic}
    given: dict[str, float] = {t.name: 0.0 for t in traffic}
    by_name = {t.name: t for t in traffic}
    for position, group in enumerate(groups):
        rng = np.random.default_rng([seed, position, draw])
        copies = min(group.number, MOST_REPLICAS)
        trace = _share(group, copies, by_name, rng, lost or {})
        if trace is None:
            continue
        ttft, tpot = _run(group.template, copies, trace, evaluators[group.template.model.name])
        counted = trace.arrival_s >= WARM_UP * trace.arrival_s[-1]
        index = np.zeros(len(trace), np.int64) if trace.class_index is None else trace.class_index
        for number, name in enumerate(trace.classes):
            mine = counted & (index == number)
            if mine.any():
                weight = group.served_per_s[name] / mine.sum()
                seen[name].append((ttft[mine], tpot[mine], weight))
                given[name] += group.served_per_s[name]
    return [_summary(by_name[name], parts, given[name]) for name, parts in seen.items() if parts]


def _share(
    group: Group,
    copies: int,
    traffic: Mapping[str, Traffic],
    rng: np.random.Generator,
    lost: Mapping[str, float],
) -> Trace | None:
    """The requests of so many of the group's replicas: a trace's thinned, synthetic ones in another order and over longer time."""
    traces = []
    for name, rate in group.served_per_s.items():
        t = traffic[name]
        wanted = rate * (1 + lost.get(name, 0.0)) * copies / group.number
        if wanted <= 0:
            continue
        trace = Trace(t.trace.arrival_s, t.trace.input_tokens, t.trace.output_tokens, (name,))
        if t.from_trace:
            kept = rng.random(len(trace)) < min(1.0, wanted / t.rate_per_s)
            kept[0] = True
            trace = Trace(trace.arrival_s[kept], trace.input_tokens[kept], trace.output_tokens[kept], (name,))
        else:
            trace = _reordered(trace, rng).compressed(wanted / t.rate_per_s)
        traces.append(trace)
    if not traces:
        return None
    span = min(float(trace.arrival_s[-1]) for trace in traces)
    traces = [_seen_more(trace, traces, span, traffic) for trace in traces]
    cut = [trace.first(max(1, int(np.searchsorted(trace.arrival_s, span, side="right")))) for trace in traces]
    merged = merge(cut)
    classes = [traffic[name] for name in merged.classes]
    if any(t.from_trace for t in classes):
        return merged
    least_s = LEAST_ANSWERS * max(t.output_tokens * min(t.tpot_s, SLOW_TPOT_S) for t in classes)
    least_s = max(
        least_s,
        *(_last_of_least_s(trace, span) for trace in cut if not traffic[trace.classes[0]].is_batch),
        0.0,
    )
    return merged.first(max(LEAST_REQUESTS, int(np.searchsorted(merged.arrival_s, least_s, side="right"))))


def _last_of_least_s(trace: Trace, span_s: float) -> float:
    """When `LEAST_SEEN` have come after the warm-up; all of a shorter trace."""
    last = round(LEAST_SEEN / (1 - WARM_UP))
    return float(trace.arrival_s[last]) if last < len(trace) else span_s


def _seen_more(trace: Trace, traces: Sequence[Trace], span_s: float, traffic: Mapping[str, Traffic]) -> Trace:
    """A class that hardly comes in the time that its neighbours' requests take, sped up: one that never came would keep any
    limit. By no more than what its neighbours hardly feel."""
    (name,) = trace.classes
    number = min(round(LEAST_SEEN / (1 - WARM_UP)), len(trace) - 1)
    if traffic[name].is_batch or number < 1 or trace.arrival_s[number] <= span_s:
        return trace
    others = sum(
        float(np.sum((t.input_tokens + t.output_tokens)[t.arrival_s <= span_s]))
        for t in traces
        if t is not trace
    )
    brought = np.cumsum(trace.input_tokens + trace.output_tokens)
    number = min(number, int(np.searchsorted(brought, MOST_SPED_UP * others, side="right")))
    return trace.compressed(max(1.0, float(trace.arrival_s[number]) / span_s))


def _reordered(trace: Trace, rng: np.random.Generator) -> Trace:
    """Independent requests, as likely in any order: the same waits between them and the same lengths, each shuffled."""
    arrival = np.concatenate([[0.0], np.cumsum(rng.permutation(np.diff(trace.arrival_s)))])
    order = rng.permutation(len(trace))
    return Trace(arrival, trace.input_tokens[order], trace.output_tokens[order], trace.classes)


def _run(template: Template, copies: int, trace: Trace, evaluator: Evaluator) -> tuple[Floats, Floats]:
    if template.kind != "prefill/decode":
        shape = evaluator.machines([template]).shape(0, evaluator.engine)
        run = simulate(trace, [shape] * copies, [1.0] * copies)
        return run.ttft_s, run.tpot_s
    return _run_pools(template, copies, trace, evaluator)


def _run_pools(template: Template, copies: int, trace: Trace, evaluator: Evaluator) -> tuple[Floats, Floats]:
    """Prompts on the first pool, then the caches' transfer, then answers on the second."""
    readers, writers = template.parts
    slots = np.array([evaluator.slot_index[part.slot] for part in template.parts])
    whole = evaluator.whole(slots)
    shape = whole.shape(0, evaluator.engine)
    number = copies * readers.copies
    ones = np.ones(len(trace), dtype=np.int64)
    read = simulate(Trace(trace.arrival_s, trace.input_tokens, ones), [shape] * number, [1.0] * number)
    ready = (
        trace.arrival_s + read.ttft_s + evaluator.transfer_s(readers.slot, writers.slot, trace.input_tokens)
    )
    order = np.argsort(ready, kind="stable")
    engine = evaluator.engine
    decode = whole.without_prefill().shape(
        1, type(engine)(engine.max_num_seqs, int(trace.input_tokens.sum()) + engine.max_num_seqs)
    )
    number = copies * writers.copies
    start = float(ready[order[0]])
    run = simulate(
        Trace(ready[order] - start, trace.input_tokens[order], trace.output_tokens[order]),
        [decode] * number,
        [1.0] * number,
    )
    ttft, tpot = np.empty(len(trace)), np.empty(len(trace))
    ttft[order] = ready[order] + run.ttft_s - trace.arrival_s[order]
    tpot[order] = run.tpot_s
    return ttft, tpot


def _summary(
    traffic: Traffic, parts: Sequence[tuple[Floats, Floats, float]], given_per_s: float
) -> ClassReplay:
    ttft = np.concatenate([part[0] for part in parts])
    tpot = np.concatenate([part[1] for part in parts])
    weight = np.concatenate([np.full(len(part[0]), part[2]) for part in parts])
    met = (ttft <= traffic.ttft_s) & (np.isnan(tpot) | (tpot <= traffic.tpot_s))
    met_ratio = float((weight * met).sum() / weight.sum())
    served = min(given_per_s, traffic.rate_per_s)
    return ClassReplay(
        name=traffic.name,
        num_requests=len(ttft),
        ttft_s={p: _quantile(ttft, weight, p / 100) for p in PERCENTILES},
        tpot_s={p: _quantile(tpot, weight, p / 100) for p in PERCENTILES},
        met_ratio=met_ratio,
        goodput_tokens_per_s=served * traffic.output_tokens * met_ratio,
    )


def _quantile(values: Floats, weights: Floats, level: float) -> float:
    """Of weighted values; NaN where there are none."""
    known = ~np.isnan(values)
    if not known.any():
        return float("nan")
    values, weights = values[known], weights[known]
    order = np.argsort(values)
    below = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(below, level * below[-1])])
