"""`prove`: whether a fleet keeps every limit in the simulator, whatever the luck of its arrivals.

Owns how often a fleet is simulated and what counts as passed. What one simulation is, is `replay`'s; what is done about a plan
that fails, `decide`'s.

A limit holds if it holds with every seed, and what is shown is the worst seed's percentile, not that of all seeds' requests
together: a pooled percentile can lie below a limit that one seed broke, and what is printed would not be what was judged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bimetal.planner.evaluate import Evaluator
from bimetal.planner.replay import PERCENTILES, ClassReplay, Group, replay
from bimetal.planner.traffic import Traffic

NUM_SEEDS = 3


@dataclass(frozen=True)
class Proof:
    """What the seeds that were simulated showed."""

    replays: tuple[ClassReplay, ...]
    """Per class the worst seed's percentiles, and the mean of what was within the limits."""
    worst: Mapping[str, tuple[float, float]]
    """By interactive class, simulated over allowed: TTFT and TPOT at the 99th percentile."""
    hardest: int = 0
    """The seed that came nearest to a limit, or broke it by most."""

    @property
    def passed(self) -> bool:
        return all(map(self.keeps, self.worst))

    def keeps(self, name: str) -> bool:
        """Whether one class keeps both its limits; work without limits does."""
        return max(self.worst.get(name, (0.0, 0.0))) <= 1


def prove(
    groups: Sequence[Group],
    evaluators: Mapping[str, Evaluator],
    traffic: Sequence[Traffic],
    seed: int,
    lost: Mapping[str, float] | None = None,
    first: int = 0,
) -> Proof:
    """Simulated with `NUM_SEEDS` seeds, or up to the first that breaks a limit; `first` is the one to begin with.

    `lost`: by class, of what is asked, what routing between unlike replicas costs: they bear that much more.
    """
    limits = {t.name: t for t in traffic}
    seen: dict[str, list[ClassReplay]] = {}
    proof, most = Proof((), {}), -1.0
    hardest = first
    for draw in (first, *(d for d in range(NUM_SEEDS) if d != first)):
        for found in replay(groups, evaluators, traffic, seed, draw, lost):
            seen.setdefault(found.name, []).append(found)
        replays = tuple(map(_worst, seen.values()))
        worst = {r.name: _ratios(r, limits[r.name]) for r in replays if not limits[r.name].is_batch}
        reached = max(map(max, worst.values()), default=0.0)
        if reached > most:
            hardest, most = draw, reached
        proof = Proof(replays, worst, hardest)
        if not proof.passed:
            break
    return proof


def _worst(seeds: Sequence[ClassReplay]) -> ClassReplay:
    """Of one class."""
    return replace(
        seeds[0],
        num_requests=sum(r.num_requests for r in seeds),
        ttft_s={p: max(r.ttft_s[p] for r in seeds) for p in PERCENTILES},
        tpot_s={p: max(r.tpot_s[p] for r in seeds) for p in PERCENTILES},
        met_ratio=float(np.mean([r.met_ratio for r in seeds])),
        goodput_tokens_per_s=float(np.mean([r.goodput_tokens_per_s for r in seeds])),
    )


def _ratios(seen: ClassReplay, limits: Traffic) -> tuple[float, float]:
    tpot = seen.tpot_s[99]
    return seen.ttft_s[99] / limits.ttft_s, 0.0 if np.isnan(tpot) else tpot / limits.tpot_s
