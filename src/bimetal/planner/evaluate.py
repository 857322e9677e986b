"""`Evaluator`: templates of one model to requests per second, per class and limits.

Owns the composition of machines (chains, pools, experts apart) and what of it the wire carries. The formulas of service are
`service`'s; which templates there are is `candidates`'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from bimetal.perf.step_time import StageShape
from bimetal.planner.machines import EngineLimits, Floats, Machines, join
from bimetal.planner.service import Limits, Load, Slack, largest_load, largest_that, wait_p99_s
from bimetal.planner.stage_tables import StageTables
from bimetal.planner.templates import Slot, Template
from bimetal.planner.traffic import Traffic
from bimetal.units import DTYPE_BYTES

Indices = NDArray[np.int64]
WIRE_FILL = 0.8
"""Of a link's rate that caches on their way may take for long."""
PROMPTS_HELD = 2
"""Longest prompts that a replica which only reads prompts must hold: one being read, one on its way."""
PROMPT_FILL = 0.92
"""Of their time that such replicas read at most, in the busiest part of the trace."""
BATCH_FILL = 0.95
"""Of the time that replicas which only read prompts are busy with work that has no limit on latency."""


@dataclass(frozen=True)
class Evaluator:
    """Templates of one model under given classes of requests."""

    tables: StageTables
    traffic: tuple[Traffic, ...]
    """Classes of this model."""
    engine: EngineLimits
    slack: dict[str, Slack] = field(default_factory=dict)
    """By class."""

    @cached_property
    def slot_index(self) -> dict[Slot, int]:
        return {slot: i for i, slot in enumerate(self.tables.slots)}

    def limits(self, traffic: Traffic) -> Limits:
        return Limits(traffic.ttft_s, traffic.tpot_s)

    def rates(self, templates: Sequence[Template]) -> Floats:
        """[T, C, C]: requests per second of class [.., c] on a replica run to the limits of class [.., k, ..]; 0: it may not."""
        size = len(self.traffic)
        rates = np.zeros((len(templates), size, size))
        apart = np.array([t.kind == "prefill/decode" for t in templates], dtype=bool)
        together = np.flatnonzero(~apart)
        machines = self.machines([templates[i] for i in together.tolist()]) if len(together) else None
        pools = _Pools(self, [templates[i] for i in np.flatnonzero(apart).tolist()])
        for c, traffic in enumerate(self.traffic):
            slack = self.slack.get(traffic.name, Slack())
            for k, owner in enumerate(self.traffic):
                limits = self.limits(owner)
                if not limits.serves(self.limits(traffic)):
                    continue
                if machines is not None:
                    load = Load(traffic, self.engine, machines)
                    n = largest_load(load, limits, slack)
                    fill = BATCH_FILL if traffic.is_batch else 1.0
                    rates[together, k, c] = np.where(n > 0, fill * load.rate(np.maximum(n, 1e-9)), 0.0)
                if apart.any():
                    rates[apart, k, c] = pools.rates(traffic, limits, slack)
        return rates

    # -- machines ------------------------------------------------------------------------------------------------

    def machines(self, templates: Sequence[Template]) -> Machines:
        """Of templates that keep prefill and decode together, in their order."""
        order: list[int] = []
        parts: list[Machines] = []
        by_depth: dict[int, list[int]] = {}
        for i, template in enumerate(templates):
            depth = 0 if "expert" in template.kind else len(template.parts)
            by_depth.setdefault(depth, []).append(i)
        for depth, members in by_depth.items():
            order += members
            chosen = [templates[i] for i in members]
            parts.append(self._experts(chosen) if depth == 0 else self._chains(chosen))
        return join(parts).take(np.argsort(np.array(order)))

    def _chains(self, templates: Sequence[Template]) -> Machines:
        slots = np.array([[self.slot_index[p.slot] for p in t.parts] for t in templates], dtype=np.int64)
        boundaries = np.array([[0, *(p.end_layer for p in t.parts)] for t in templates], dtype=np.int64)
        return self.tables.chains(slots, boundaries)

    def whole(self, slots: Indices) -> Machines:
        """The whole model on each of some slots."""
        ends = np.tile(np.array([0, self.tables.num_layers], dtype=np.int64), (len(slots), 1))
        return self.tables.chains(slots[:, None], ends)

    def transfer_s(self, first: Slot, second: Slot, tokens: NDArray[np.int64]) -> Floats:
        """Of caches of so many tokens, one at a time, from one slot to another."""
        link = self.tables.link(first, second)
        seconds: Floats = (
            link.latency_s + self.cache_bytes * tokens.astype(np.float64) / link.bandwidth_bytes_per_s
        )
        return seconds

    @property
    def cache_bytes(self) -> float:
        """Of one token in all layers, no head twice."""
        tables = self.tables
        shape = StageShape(
            tables.model.spec, 0, tables.num_layers, tables.slots[0].gpu, 1, tables.model.dtype
        )
        return float(shape.kv_bytes_per_token)

    def _experts(self, templates: Sequence[Template]) -> Machines:
        """Attention and a share of the experts on the first slot, the other experts on the second.

        Each layer with experts waits for the slower of the two, and sends hidden states there and back.
        """
        tables, spec = self.tables, self.tables.model.spec
        first, second = (
            np.array([self.slot_index[t.parts[i].slot] for t in templates], dtype=np.int64) for i in (0, 1)
        )
        moved = np.array([t.expert_ratio for t in templates])
        layers = sum(spec.has_experts(i) for i in range(spec.num_layers))
        active = sum(spec.layer_params(i, float(spec.experts_per_token)) for i in range(spec.num_layers))
        share = layers * spec.experts_per_token * spec.expert_params / active
        a, b = self.whole(first), self.whole(second)
        one: dict[str, Floats] = {k: v[:, 0] for k, v in a.clocks.items()}
        other: dict[str, Floats] = {k: v[:, 0] for k, v in b.clocks.items()}

        def slower(name: str) -> Floats:
            both: Floats = np.maximum(
                (1 - moved) * one[name], moved * other[name] * other["bias"] / one["bias"]
            )
            return both

        clocks: dict[str, Floats] = {
            **one,
            "experts_s": slower("experts_s"),
            "multiply_s": (1 - share) * one["multiply_s"] + share * slower("multiply_s"),
            "prompt_token_s": (1 - share) * one["prompt_token_s"] + share * slower("prompt_token_s"),
        }
        expert_bytes = layers * spec.num_experts * spec.expert_params * DTYPE_BYTES[tables.model.dtype]
        room = tables.room_bytes
        weights = StageShape(
            spec, 0, spec.num_layers, tables.slots[0].gpu, 1, tables.model.dtype
        ).weight_bytes
        left = room[first] - (weights - moved * expert_bytes)
        tokens = np.floor(left / tables.kv_bytes(first, np.full(len(first), spec.num_layers)))
        latency, tail, rate = (table[first, second] for table in tables.links)
        carried = 2 * layers * tables.payload_bytes / rate
        return Machines(
            clocks={name: column[:, None] for name, column in clocks.items()},
            num_stages=np.ones(len(templates), dtype=np.int64),
            hop_s=2 * layers * latency,
            hop_p99_s=2 * layers * tail,
            hop_token_s=carried,
            wire_token_s=carried,
            kv_tokens=np.where(moved * expert_bytes <= room[second], tokens, -1.0),
        )


class _Pools:
    """Templates whose prompts are read on one pool of replicas and whose answers are decoded on another."""

    def __init__(self, evaluator: Evaluator, templates: Sequence[Template]) -> None:
        self._evaluator = evaluator
        if not templates:
            return
        index = evaluator.slot_index
        ends = np.array([[index[t.parts[0].slot], index[t.parts[1].slot]] for t in templates])
        self._copies = np.array([[t.parts[0].copies, t.parts[1].copies] for t in templates], dtype=float)
        pairs, self._pair = np.unique(ends, axis=0, return_inverse=True)
        self._prefill = evaluator.whole(pairs[:, 0])
        decoders, self._decoder = np.unique(ends[:, 1], return_inverse=True)
        self._decode = evaluator.whole(decoders).without_prefill()
        latency, _, rate = evaluator.tables.links
        self._latency_s = latency[pairs[:, 0], pairs[:, 1]]
        slots = evaluator.tables.slots
        named = [evaluator.tables.demand.link_between(slots[a].gpu, slots[b].gpu) for a, b in pairs]
        ratios = np.array([[slots[a].node_ratio, slots[b].node_ratio] for a, b in pairs])
        self._end_bytes_per_s = np.array([link.bandwidth_bytes_per_s for link in named])[:, None] * ratios
        self._one_bytes_per_s = rate[pairs[:, 0], pairs[:, 1]]

    def transfer_s(self, tokens: float) -> Floats:
        """[pairs] of the cache of one prompt."""
        seconds: Floats = self._latency_s + self._evaluator.cache_bytes * tokens / self._one_bytes_per_s
        return seconds

    def rates(self, traffic: Traffic, limits: Limits, slack: Slack) -> Floats:
        """[T]: what the slowest of prompts, wire and answers lets through."""
        prompts = self._prompt_rate(traffic, limits, slack)[self._pair]
        load = Load(traffic, self._evaluator.engine, self._decode, reads_prompts=False)
        n = largest_load(load, Limits(np.inf, limits.tpot_s), slack)
        answers = np.where(n > 0, load.rate(np.maximum(n, 1e-9)), 0.0)[self._decoder]
        wire = (self._end_bytes_per_s[self._pair] * self._copies).min(axis=1)
        carried = (
            WIRE_FILL * wire / (self._evaluator.cache_bytes * traffic.input_tokens * traffic.peak_input_ratio)
        )
        rates: Floats = np.minimum(
            carried, np.minimum(self._copies[:, 0] * prompts, self._copies[:, 1] * answers)
        )
        return rates

    def _prompt_rate(self, traffic: Traffic, limits: Limits, slack: Slack) -> Floats:
        """[pairs] prompts per second of one prefill replica, the transfer and a first step on the other side included."""
        m, t = self._prefill, traffic
        budget = self._evaluator.engine.max_num_batched_tokens
        fixed = (m.clocks["fixed_s"] * m.clocks["bias"]).sum(axis=1)
        service = m.prompt_stage_s(t.input_tokens, t.input_square).max(axis=1) + fixed
        longest = t.input_p99_tokens
        own = m.prompt_stage_s(longest, longest**2).sum(axis=1) + np.ceil(longest / budget) * fixed
        fits = m.kv_tokens > PROMPTS_HELD * longest
        if not np.isfinite(limits.ttft_s):
            return np.where(fits, BATCH_FILL / (service * t.peak_input_ratio), 0.0)
        ceiling = PROMPT_FILL / (service * t.peak_input_ratio) / max(slack.ttft, 1.0)
        first_step = limits.tpot_s if np.isfinite(limits.tpot_s) else 0.0
        after = self.transfer_s(longest) + first_step

        def holds(rate: Floats) -> NDArray[np.bool_]:
            peak = rate * t.peak_input_ratio
            replicas = np.maximum(t.rate_per_s / rate, 1.0)
            ttft = wait_p99_s(peak * service, service, t.input_cv2, replicas) + own + after
            held: NDArray[np.bool_] = (ttft * slack.ttft <= limits.ttft_s) & fits
            return held

        return largest_that(holds, ceiling * 1e-3, ceiling)
