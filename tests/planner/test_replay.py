"""What a run of a group's replicas holds of each class."""

from pathlib import Path

import numpy as np
import pytest

from bimetal.catalog.demand import parse_demand
from bimetal.perf.calibration import published_calibration
from bimetal.planner.decide import FleetPlanner
from bimetal.planner.replay import LEAST_SEEN, MOST_SPED_UP, WARM_UP, Group, _share, replay

TEXT = """\
stock: [{gpu: H100, count: 8}]
models: [{name: Llama-3.1-8B}]
demand:
  - {name: chat, kind: interactive, model: Llama-3.1-8B, rate_per_s: 100, input_tokens: 400, output_tokens: 10,
     ttft_p99_s: 1, tpot_p99_s: 0.06}
  - {name: rare, kind: interactive, model: Llama-3.1-8B, rate_per_s: RATE, input_tokens: INPUT, output_tokens: 10,
     ttft_p99_s: 1, tpot_p99_s: 0.06}
"""


def group(rate, tokens):
    text = TEXT.replace("RATE", str(rate)).replace("INPUT", str(tokens))
    p = FleetPlanner(parse_demand(text, "d"), Path("."), published_calibration())
    whole = next(t for t in p.templates if t.kind == "replica" and t.num_gpus(0) == 8)
    return p, Group(whole, 1, {"chat": 100.0, "rare": float(rate)})


def run(rate, tokens):
    p, both = group(rate, tokens)
    trace = _share(both, 1, {t.name: t for t in p.traffic}, np.random.default_rng(0), {})
    rare = trace.class_index == trace.classes.index("rare")
    return trace, rare, trace.arrival_s >= WARM_UP * trace.arrival_s[-1]


@pytest.mark.parametrize("rate", [1e-4, 0.5, 2.0])
def test_a_class_that_hardly_comes_is_seen_often_enough(rate):
    """One in a million, one in two hundred, one in fifty."""
    trace, rare, counted = run(rate, 400)
    assert (rare & counted).sum() >= 0.95 * LEAST_SEEN
    assert len(trace) / trace.arrival_s[-1] == pytest.approx(100 + rate, rel=0.05)


def test_large_requests_come_no_more_often_than_their_neighbours_bear():
    trace, rare, _ = run(1e-4, 50_000)
    tokens = trace.input_tokens + trace.output_tokens
    assert 1 < rare.sum() < LEAST_SEEN
    assert tokens[rare].sum() <= MOST_SPED_UP * tokens[~rare].sum() * 1.01


def test_a_class_that_hardly_comes_is_judged():
    p, both = group(1e-4, 400)
    found = {r.name: r for r in replay([both], p.evaluators, p.traffic, 0)}
    assert found["rare"].num_requests >= 0.95 * LEAST_SEEN
    assert found["rare"].ttft_s[99] > 0
