"""`trim`: a plan made smaller, one node at a time, as long as its simulation keeps every limit.

Owns which GPUs are taken away, in which order, and how traffic is shared over what is left. The formulas refuse such a plan;
whether it holds is the caller's to prove (`proof`). What stays as it is: jobs and their GPUs, whole nodes, which templates there
are and to whose limits they run. A smaller fleet is within every cap on watts and dollars that the larger one was within.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bimetal.planner.formulation import Chosen
from bimetal.planner.milp import Floats, Milp
from bimetal.planner.problem import Problem
from bimetal.planner.proof import Proof

MOST_FAILURES = 3
"""Simulations that break a limit, before it is left at that."""
LEAST_SAVING_USD = 1e-6
LEAST_RATIO = 0.8
"""Of the demand: a fleet of which the formulas say less is not worth simulating."""
Replicas = Mapping[tuple[int, int], int]
"""(template, limits) to a number."""
Move = tuple[int, tuple[int, int]]
"""The kind of GPU to save, and the replicas to do without."""


@dataclass(frozen=True)
class Trimmed:
    """A fleet smaller than the formulas allow."""

    chosen: Chosen
    formula_ratios: tuple[float, ...]
    """[C] of the demand, what the formulas say that it serves, at most all."""

    @property
    def formula_ratio(self) -> float:
        """Of the class that lacks most."""
        return min(self.formula_ratios, default=1.0)


def trim(
    problem: Problem, chosen: Chosen, prove: Callable[[Chosen], Proof], held: Sequence[bool]
) -> tuple[Trimmed, Proof] | None:
    """The smallest fleet found that passes; None: none smaller than `chosen` did. `held`: see `share`.

    Greedy: the dearest saving first, and begun again from what passed. What failed once is not tried on a still smaller fleet.
    """
    best: tuple[Trimmed, Proof] | None = None
    failed: set[Move] = set()
    while len(failed) < MOST_FAILURES:
        now = best[0].chosen if best else chosen
        options = [
            (move, shared)
            for move, left in _smaller(problem, now)
            if move not in failed and (shared := share(problem, now, left, held))
        ]
        options = [
            (move, o)
            for move, o in options
            if o.formula_ratio >= LEAST_RATIO and o.chosen.usd_per_h < now.usd_per_h - LEAST_SAVING_USD
        ]
        if not options:
            break
        move, option = min(options, key=lambda o: (round(o[1].chosen.usd_per_h, 6), -o[1].formula_ratio))
        proof = prove(option.chosen)
        if proof.passed:
            best = option, proof
        else:
            failed.add(move)
    return best


def _smaller(problem: Problem, chosen: Chosen) -> Iterator[tuple[Move, dict[tuple[int, int], int]]]:
    """What is left with a node of one kind less, or with a replica less where owned GPUs cost their power."""
    needed, owned = _needed(problem, chosen, chosen.replicas), _owned(problem, chosen)
    for g in np.flatnonzero(needed > 0).tolist():
        if chosen.nodes[g] > 0:
            room = owned[g] + problem.per_node[g] * (chosen.nodes[g] - 1)
        else:
            room = needed[g] - 1
        for key, number in chosen.replicas.items():
            used = problem.usage[key[0], g]
            drop = int(np.ceil((needed[g] - room) / used - 1e-9)) if used else 0
            if 0 < drop <= number:
                left = {k: n - drop * (k == key) for k, n in chosen.replicas.items()}
                yield (g, key), {k: n for k, n in left.items() if n}


def _owned(problem: Problem, chosen: Chosen) -> Floats:
    """[G] owned GPUs that may be used; of one GPU at several power limits, the nodes that are set to each."""
    owned = problem.owned.copy()
    for pool in problem.pools:
        for g in pool.kinds:
            owned[g] = np.ceil(chosen.owned_used[g] / problem.per_node[g]) * problem.per_node[g]
    return owned


def _needed(problem: Problem, chosen: Chosen, replicas: Replicas) -> Floats:
    """[G] GPUs of so many replicas, and of the jobs."""
    needed = np.zeros(len(problem.owned))
    for (t, _), number in replicas.items():
        needed += problem.usage[t] * number
    for job, g in chosen.jobs.items():
        needed[g] += problem.jobs[job, g]
    return needed


def share(problem: Problem, chosen: Chosen, replicas: Replicas, held: Sequence[bool]) -> Trimmed | None:
    """All of the demand over other replicas than those chosen, on as few of the nodes as hold them; None: they do not serve it.

    Classes of one model, which share replicas, are overloaded alike: over the model's classes c and composition p, the main one,

        maximise m   subject to   sum_c z_tkc <= N_tk
                                  sum_tk rate_tkc z_tkc >= m wanted_c + loss_c + spare_c
                                  loss_c >= e_c (m wanted_c - sum_(tk of p) rate_tkc z_tkc)

    and what each replica bears is its part of that, over m. spare_c: the largest replica that serves a class with N+1.
    `held` [C]: m is 1 for it. A class without limits has none that a simulation could see broken, so that the formulas must
    say that it is served.
    """
    able = {
        (t, k, int(c)): float(problem.rate[t, k, c])
        for t, k in replicas
        for c in np.flatnonzero(problem.rate[t, k])
    }
    milp, wanted = Milp(), problem.wanted * chosen.served_ratio
    asked = np.flatnonzero(wanted > 0).tolist()
    same = _together(able, len(problem.wanted))
    multiple = milp.variables(len(problem.wanted), cost=-1.0)  # one of each group of classes is used
    loss = milp.variables(len(problem.wanted))
    one = milp.variables(1, lower=1.0, upper=1.0)[0]
    z = dict(zip(able, milp.variables(len(able)).tolist(), strict=True))
    for key, number in replicas.items():
        milp.row([([i for at, i in z.items() if at[:2] == key], 1.0)], upper=float(number))
    mains = np.zeros(len(wanted), dtype=np.int64)
    for c in asked:
        mine = [at for at in able if at[2] == c]
        if not mine:
            return None
        columns, rates = [z[at] for at in mine], np.array([able[at] for at in mine])
        room = rates * [replicas[at[:2]] for at in mine]
        kinds = problem.kind[[at[0] for at in mine]]
        mains[c] = max(set(kinds.tolist()), key=lambda p: float(room[kinds == p].sum()))
        spare = rates.max() if problem.spare[c] else 0.0
        lost, m = problem.mixed_loss[c], one if held[c] else multiple[same[c]]
        milp.row([(columns, rates), (m, -wanted[c]), (loss[c], -1.0)], lower=spare)
        milp.row(
            [(loss[c], 1.0), (m, -lost * wanted[c]), (columns, lost * rates * (kinds == mains[c]))], lower=0.0
        )
    unused = [i for i in multiple if i not in {multiple[same[c]] for c in asked if not held[c]}]
    milp.row([(unused, 1.0)], upper=0.0)
    solved = milp.solve(relax=True)
    if solved.status != "optimal":
        return None
    multiples = np.where(held, 1.0, solved.values[multiple[same]])
    if (multiples[asked] <= 0).any():
        return None
    served = {at: able[at] * solved.values[i] for at, i in z.items() if solved.values[i] > 1e-9}
    total, main = np.zeros(len(wanted)), np.zeros(len(wanted))
    for at, rate in served.items():
        total[at[2]] += rate
        main[at[2]] += rate * (problem.kind[at[0]] == mains[at[2]])
    served = {at: rate * wanted[at[2]] / total[at[2]] for at, rate in served.items()}
    lost_per_s = problem.mixed_loss * wanted * (1 - main / np.maximum(total, 1e-12)) * (total > 0)
    return Trimmed(
        _bought(problem, replace(chosen, served_per_s=served, lost_per_s=lost_per_s), replicas),
        tuple(float(min(1.0, m)) if w > 0 else 1.0 for m, w in zip(multiples, wanted, strict=True)),
    )


def _together(able: Mapping[tuple[int, int, int], float], num_classes: int) -> list[int]:
    """[C] the first class that each shares replicas with."""
    same = list(range(num_classes))
    for t, k, c in able:
        for u, v, d in able:
            if (t, k) == (u, v) and same[c] != same[d]:
                low, high = sorted((same[c], same[d]))
                same = [low if x == high else x for x in same]
    return same


def _bought(problem: Problem, chosen: Chosen, replicas: Replicas) -> Chosen:
    """Those replicas that serve somebody, on owned GPUs first and then as few nodes as hold them."""
    serving = {at[:2] for at in chosen.served_per_s}
    kept = {key: n for key, n in replicas.items() if key in serving}
    needed = _needed(problem, chosen, kept)
    own = np.minimum(_owned(problem, chosen), needed)
    nodes = np.ceil((needed - own) / problem.per_node - 1e-9).astype(np.int64)
    usd = nodes * problem.per_node * problem.price_usd_per_h + own * problem.owned_usd_per_h
    return replace(chosen, replicas=kept, nodes=nodes, owned_used=own, usd_per_h=float(usd.sum()))


def without_largest(problem: Problem, chosen: Chosen, c: int) -> Chosen | None:
    """The fleet after the largest replica that serves a class is gone, with the traffic shared over the rest; None: nothing is left."""
    serving = {at[:2] for at in chosen.served_per_s if at[2] == c}
    largest = max(serving, key=lambda key: float(problem.rate[(*key, c)]))
    left = {key: n - (key == largest) for key, n in chosen.replicas.items()}
    none = [False] * len(problem.spare)
    shared = share(replace(problem, spare=none), chosen, {k: n for k, n in left.items() if n}, none)
    return shared.chosen if shared else None
