"""Which templates there are: every way of serving a model with what is in stock, pruned with the reason kept.

    replica                 one group holds the model
    layer split             two groups, every boundary, the best for each class kept; longer chains where two do not do
    prefill/decode          pools of groups in small ratios, the cache carried from one to the other
    expert split            attention and some experts on one group, the other experts on another (all: attention/expert)

Owns the enumeration. What a template serves is `evaluate`'s, what is chosen the optimiser's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd

import numpy as np

from bimetal.planner.evaluate import Evaluator, Indices
from bimetal.planner.machines import Floats
from bimetal.planner.service import Load, Slack, largest_load
from bimetal.planner.split import best_split
from bimetal.planner.stage_tables import StageTables
from bimetal.planner.templates import Part, Slot, Template
from bimetal.planner.traffic import Traffic
from bimetal.policy.batching import max_num_micro_batches

FIRST_GUESS_SEQS = 32.0
REFINEMENTS = 2
"""Boundaries are the best for a number of sequences, which is the best for the boundaries: so many times."""
LONGEST_CHAIN = 4
POOL_RATIOS = tuple((a, b) for a, b in product((1, 2, 3, 4, 6), repeat=2) if gcd(a, b) == 1)
"""Replicas that read prompts to replicas that decode."""
EXPERT_RATIOS = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Candidates:
    """Templates of all models and what each may serve."""

    templates: tuple[Template, ...]
    usage: Floats
    """[T, stock] GPUs of one replica."""
    rate: Floats
    """[T, K, C] requests per second of class c on a replica run to the limits of class k; 0: not allowed, or not able."""
    excluded: tuple[str, ...]
    """What was left out, and why."""

    def __len__(self) -> int:
        return len(self.templates)

    def keep(self, wanted: Sequence[bool]) -> Candidates:
        """Only those."""
        index = np.flatnonzero(np.array(wanted, dtype=bool))
        return Candidates(
            tuple(self.templates[i] for i in index), self.usage[index], self.rate[index], self.excluded
        )


def enumerate_templates(evaluator: Evaluator) -> tuple[list[Template], list[str]]:
    """Of one model; and what does not fit."""
    templates, reasons = _replicas(evaluator.tables)
    whole = {template.parts[0].slot for template in templates}
    for kind in (_two_stage_chains(evaluator), _long_chains(evaluator, whole), _pools(evaluator, whole)):
        templates += kind
    templates += _expert_splits(evaluator.tables)
    found = _in_stock(templates, evaluator.tables)
    if len(found) < len(templates):
        reasons.append(
            f"{len(templates) - len(found)} templates of {evaluator.tables.model.name} need more GPUs than are in stock"
        )
    return found, reasons


def _in_stock(templates: Sequence[Template], tables: StageTables) -> list[Template]:
    counts = [entry.count for entry in tables.demand.stock]
    return [t for t in templates if all(t.num_gpus(g) <= counts[g] for g in t.composition)]


def _replicas(tables: StageTables) -> tuple[list[Template], list[str]]:
    every = np.arange(len(tables.slots))
    ends = np.tile(np.array([0, tables.num_layers]), (len(every), 1))
    tokens = tables.chains(every[:, None], ends).kv_tokens
    fitting = [
        Template("replica", tables.model, (Part(slot, 0, tables.num_layers),))
        for slot, held in zip(tables.slots, tokens, strict=True)
        if held >= 1
    ]
    too_small = [slot.label for slot, held in zip(tables.slots, tokens, strict=True) if held < 1]
    name = f"{tables.model.name} at {tables.model.dtype}"
    return fitting, [f"{name} does not fit {', '.join(too_small)} whole"] if too_small else []


def _two_stage_chains(evaluator: Evaluator) -> Iterator[Template]:
    """Every ordered pair of slots, but of one kind of GPU only equal ones; per class the boundary that serves most."""
    tables = evaluator.tables
    slots = tables.slots
    ends = np.array(
        [
            (a, b)
            for a, b in product(range(len(slots)), repeat=2)
            if slots[a].gpu.name != slots[b].gpu.name or a == b
        ],
        dtype=np.int64,
    )
    chosen: set[tuple[int, int]] = set()
    for traffic in evaluator.traffic:
        boundaries = best_boundaries(evaluator, traffic, ends)
        chosen |= {(m, int(cut)) for m, cut in enumerate(boundaries) if cut > 0}
    for m, cut in sorted(chosen):
        yield _chain(tables, [int(s) for s in ends[m]], (0, cut, tables.num_layers))


def best_boundaries(evaluator: Evaluator, traffic: Traffic, ends: Indices) -> Indices:
    """[M] of every pair of slots the boundary with the lowest time per token at the load that the pair bears; 0: none fits.

    All boundaries are looked at, so this is exact for the surrogate at that load.
    """
    tables, limits = evaluator.tables, evaluator.limits(traffic)
    slack = evaluator.slack.get(traffic.name, Slack())
    cuts = np.arange(1, tables.num_layers)
    size, number = len(ends), len(cuts)
    boundaries = np.stack(
        [np.zeros(size * number, int), np.tile(cuts, size), np.full(size * number, tables.num_layers)], axis=1
    )
    machines = tables.chains(np.repeat(ends, number, axis=0), boundaries)
    load = Load(traffic, evaluator.engine, machines)
    fits = (machines.kv_tokens >= 1).reshape(size, number)
    seqs = np.full(size, FIRST_GUESS_SEQS)
    best = np.zeros(size, dtype=np.int64)
    for _ in range(REFINEMENTS):
        n = np.repeat(seqs, number)
        tpot = np.where(
            machines.kv_tokens >= n * traffic.context_tokens, load.tpot_s(n), 1e9 - machines.kv_tokens
        )
        best = np.argmin(np.where(fits, tpot.reshape(size, number), np.inf), axis=1)
        picked = machines.take(np.arange(size) * number + best)
        seqs = np.maximum(largest_load(Load(traffic, evaluator.engine, picked), limits, slack), 1.0)
    return np.where(fits.any(axis=1), cuts[best], 0)


def _long_chains(evaluator: Evaluator, whole: set[Slot]) -> Iterator[Template]:
    """Three and more stages: of single GPUs of one kind, and of whole-node groups where no shorter chain holds the model."""
    tables = evaluator.tables
    slots = tables.slots
    largest = {slot.stock: i for i, slot in enumerate(slots)}
    for i, slot in enumerate(slots):
        if slot.tensor_parallel == 1 and slot not in whole:
            for depth in range(3, LONGEST_CHAIN + 1):
                yield from _exact_chains(evaluator, [i] * depth)
    for a, b in product(largest.values(), repeat=2):
        if slots[a] in whole or slots[b] in whole:
            continue
        if a != b and slots[a].gpu.name == slots[b].gpu.name:  # at two power limits: the faster would wait
            continue
        for depth in range(3, LONGEST_CHAIN + 1):
            found = [
                chain
                for front in range(1, depth)
                for chain in _exact_chains(evaluator, [a] * front + [b] * (depth - front))
            ]
            yield from found
            if found:
                break


def _exact_chains(evaluator: Evaluator, chain: list[int]) -> Iterator[Template]:
    """Per class the exact split (`split.best_split`), prompts' work counted into the stages' time."""
    tables = evaluator.tables
    slot = np.array(chain, dtype=np.int64)
    chosen: set[tuple[int, ...]] = set()
    for traffic in evaluator.traffic:
        for num_seqs in (4 * FIRST_GUESS_SEQS, FIRST_GUESS_SEQS, FIRST_GUESS_SEQS / 4):
            costs = _ChainCosts(tables, slot, traffic, num_seqs)
            split = best_split(costs.of, lambda k: ([], 0.0), max_num_micro_batches(len(chain)))
            if split is not None:
                chosen.add(split.boundaries)
                break
    for boundaries in sorted(chosen):
        yield _chain(tables, chain, boundaries)


class _ChainCosts:
    """Seconds of a micro-batch on every stage and range, prompts included."""

    def __init__(self, tables: StageTables, slot: Indices, traffic: Traffic, num_seqs: float) -> None:
        self._traffic, self._num_seqs = traffic, num_seqs
        classes = tables.classes
        ranges = np.array(classes.examples)
        parts = [tables.chains(np.full((len(ranges), 1), s), ranges) for s in slot]
        fits = [part.kv_tokens >= num_seqs * traffic.context_tokens for part in parts]
        self._parts, self._fits, self._index = parts, fits, classes.index

    def of(self, num_micro_batches: int) -> Floats:
        """[stage, start, end] for `split.best_split`; hops, equal for every boundary, are left out."""
        t, size = self._traffic, self._num_seqs / num_micro_batches
        tables = []
        for part, fits in zip(self._parts, self._fits, strict=True):
            prompts = part.prompt_stage_s(t.input_tokens, t.input_square)[:, 0]
            steps = part.stage_step_s(np.full(len(part), size), t.context_tokens)[:, 0]
            seconds = np.where(fits, steps + size * prompts / t.output_tokens, np.inf)
            tables.append(np.append(seconds, np.inf)[self._index])
        return np.stack(tables)


def _chain(tables: StageTables, slots: Sequence[int], boundaries: Sequence[int]) -> Template:
    parts = [
        Part(tables.slots[s], int(start), int(end))
        for s, start, end in zip(slots, boundaries[:-1], boundaries[1:], strict=True)
    ]
    return Template("layer split", tables.model, tuple(parts))


def _pools(evaluator: Evaluator, whole: set[Slot]) -> Iterator[Template]:
    layers = evaluator.tables.num_layers
    for first, second in product(sorted(whole, key=lambda s: (s.stock, s.tensor_parallel)), repeat=2):
        for readers, writers in POOL_RATIOS:
            yield Template(
                "prefill/decode",
                evaluator.tables.model,
                (
                    Part(first, 0, layers, readers, "prefill"),
                    Part(second, 0, layers, writers, "decode"),
                ),
            )


def _expert_splits(tables: StageTables) -> Iterator[Template]:
    if not tables.model.spec.num_experts:
        return
    layers = tables.num_layers
    for (first, second), ratio in product(product(tables.slots, repeat=2), EXPERT_RATIOS):
        if first.gpu.name == second.gpu.name:
            continue
        yield Template(
            "attention/expert split" if ratio == 1.0 else "expert split",
            tables.model,
            (Part(first, 0, layers, 1, "attention"), Part(second, 0, layers, 1, "experts")),
            ratio,
        )
