"""From logits to ids on the last stage: biases, penalties and token masks, then the kernels' sampling, then
log-probabilities where they were asked for.

Order: log-probabilities are of the model's own logits; then penalties, biases, mask, temperature and the filters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bimetal.engine.device import Device, HostCopy
from bimetal.engine.kernels.interface import Kernels, SamplingTensors
from bimetal.engine.wire.step import NO_TARGET, PenaltyRows, Sampled, SamplingRows, Step

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class SampledTensors:
    """`Sampled` on the device; `download` starts its way to the host."""

    ids: Tensor
    logprobs: Tensor | None
    ranks: Tensor | None
    top_ids: Tensor | None
    top_logprobs: Tensor | None

    def download(self, device: Device) -> SampledCopies:
        return SampledCopies(
            *(
                None if t is None else device.download(t)
                for t in (self.ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs)
            )
        )


@dataclass(frozen=True, slots=True)
class SampledCopies:
    ids: HostCopy | None
    logprobs: HostCopy | None
    ranks: HostCopy | None
    top_ids: HostCopy | None
    top_logprobs: HostCopy | None

    @property
    def copies(self) -> tuple[HostCopy, ...]:
        copies = (self.ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs)
        return tuple(copy for copy in copies if copy is not None)

    def wait(self) -> Sampled:
        assert self.ids is not None
        arrays = [
            None if c is None else c.wait().numpy()
            for c in (self.logprobs, self.ranks, self.top_ids, self.top_logprobs)
        ]
        return Sampled(self.ids.wait().numpy(), *arrays)


class Sampler:
    """Holds the ids last sampled for each sequence slot, which a step written ahead of them refers to."""

    def __init__(self, kernels: Kernels, device: Device, max_num_seqs: int) -> None:
        self._kernels = kernels
        self._device = device
        self.pool = torch.zeros(max_num_seqs, dtype=torch.int32, device=device.torch_device)

    def __call__(self, logits: Tensor, step: Step, masks: dict[int, NDArray[np.uint32]]) -> SampledTensors:
        """logits: [R, V], overwritten where penalties, biases or masks apply. `masks`: bit sets by logit row."""
        upload = self._device.upload
        scores = logits.float() if step.num_logprobs is not None else None
        if step.penalties is not None or step.bias is not None or masks:
            logits = logits.float().clone()
        slots = upload(step.sequence_slots[step.logit_sequences]).long()
        if step.penalties is not None:
            self._penalise(logits, step.penalties, slots)
        if step.bias is not None:
            index = (upload(step.bias.rows).long(), upload(step.bias.ids).long())
            values = upload(step.bias.values.view(np.int32)).view(torch.float32)
            logits.index_put_(index, values, accumulate=True)
        for row, bits in masks.items():
            self._mask(logits[row], self._unpack(bits, logits.shape[1]))
        if step.sampling is None:
            ids = self._kernels.greedy(logits)
        else:
            ids = self._kernels.sample(logits, self._tensors(step.sampling))
        samples = step.targets == NO_TARGET
        if samples.all():
            self.pool[slots] = ids
        else:
            targets = upload(step.targets)
            ids = torch.where(targets == NO_TARGET, ids, targets)
            rows = upload(np.flatnonzero(samples).astype(np.int32)).long()
            self.pool[slots[rows]] = ids[rows]
        if scores is None or step.num_logprobs is None:
            return SampledTensors(ids, None, None, None, None)
        return self._score(scores, ids, max(int(step.num_logprobs.max()), 0))

    def _tensors(self, rows: SamplingRows) -> SamplingTensors:
        upload = self._device.upload

        def floats(values: NDArray[np.float32]) -> Tensor:
            return upload(values.view(np.int32)).view(torch.float32)

        return SamplingTensors(
            temperatures=floats(rows.temperatures),
            uniforms=floats(rows.uniforms),
            top_ks=upload(rows.top_ks) if rows.top_ks.any() else None,
            top_ps=floats(rows.top_ps) if (rows.top_ps < 1).any() else None,
            min_ps=floats(rows.min_ps) if rows.min_ps.any() else None,
        )

    def _penalise(self, logits: Tensor, rows: PenaltyRows, slots: Tensor) -> None:
        """Repetition scales what prompt or output hold; presence and frequency lower what the output holds."""
        for r in range(len(rows.repetition)):
            begin, end = int(rows.starts[r]), int(rows.starts[r + 1])
            if begin == end:
                continue
            history = self._device.upload(rows.history[begin:end]).long()
            if rows.pending[r]:
                history = torch.cat((history, self.pool[slots[r]].view(1).long()))
            row = logits[r]
            seen = torch.zeros_like(row, dtype=torch.bool).index_fill_(0, history, True)
            scaled = torch.where(row > 0, row / float(rows.repetition[r]), row * float(rows.repetition[r]))
            counts = torch.zeros_like(row)
            output = history[int(rows.prompt_lens[r]) :]
            counts.index_add_(0, output, torch.ones_like(output, dtype=row.dtype))
            row = torch.where(seen, scaled, row)
            row -= float(rows.presence[r]) * (counts > 0) + float(rows.frequency[r]) * counts
            logits[r] = row

    def _mask(self, row: Tensor, allowed: Tensor) -> None:
        """Where biases forbid all that the grammar allows (a minimum length, its end), the grammar holds."""
        row.masked_fill_(~allowed, -torch.inf)
        is_dead = row.amax() == -torch.inf
        row.copy_(torch.where(is_dead & allowed, 0.0, row))

    def _unpack(self, bits: NDArray[np.uint32], vocab_size: int) -> Tensor:
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[:vocab_size]
        mask = torch.zeros(vocab_size, dtype=torch.bool)
        mask[: len(allowed)] = torch.from_numpy(allowed.astype(np.bool_))
        return mask.to(self._device.torch_device)

    def _score(self, scores: Tensor, ids: Tensor, num_top: int) -> SampledTensors:
        logprobs = torch.log_softmax(scores, dim=-1)
        chosen = logprobs.gather(1, ids.long().unsqueeze(1))
        ranks = (logprobs > chosen).sum(1).to(torch.int32) + 1
        top_logprobs, top_ids = torch.topk(logprobs, num_top, dim=-1)
        return SampledTensors(ids, chosen.squeeze(1), ranks, top_ids.to(torch.int32), top_logprobs)
