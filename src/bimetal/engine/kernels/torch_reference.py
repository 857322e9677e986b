"""`TorchKernels`: the kernels' contract (`interface.Kernels`) in plain torch, for any device and dtype.

It is the CPU's path and the oracle that the Triton kernels are tested against. It rounds where transformers rounds, so
that in float32 a model on the CPU gives transformers' own numbers. It knows nothing of models, schedules or graphs;
host synchronisations happen only for prefill, for experts and for sampling filters, never for decode attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from bimetal.engine.kernels.encoding import Encoding, ScaledWeight, Weight
from bimetal.engine.kernels.interface import AttentionMetadata, SamplingTensors, Tensor

_FEW_CANDIDATES = 1024
"""Sampling filters look at this many of the most probable tokens before they sort a whole vocabulary."""


class TorchKernels:
    """`interface.Kernels` in plain torch. All it remembers is where the last step's decoding sequences read their keys,
    which is the same in every layer."""

    def __init__(self, keeps_fp8: bool = False) -> None:
        """`keeps_fp8`: quantised weights stay as they are stored and are widened at every use, which saves memory and costs
        time."""
        self._keeps_fp8 = keeps_fp8
        self._last: tuple[AttentionMetadata, int | None, DecodeReads] | None = None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # Normalised in float32, rounded to x's dtype, then scaled: the order in which Llama's own code rounds.
        if x.dtype == torch.float32:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
        return F.rms_norm(x, x.shape[-1:], None, eps) * weight

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def rotary_and_cache(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: AttentionMetadata,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        num_kv_heads, head_dim = k_cache.shape[-2:]
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        num_heads = heads.shape[1] - 2 * num_kv_heads
        turned, v = heads[:, : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
        if q_norm is not None and k_norm is not None:
            q, k = turned[:, :num_heads], turned[:, num_heads:]
            turned = torch.cat((self.rms_norm(q, q_norm, eps), self.rms_norm(k, k_norm, eps)), dim=1)
        cos, sin = cos_sin[meta.positions].unsqueeze(1).chunk(2, dim=-1)
        turned = _rotate(turned, cos, sin)
        _write(k_cache, v_cache, turned[:, num_heads:], v, meta.slots)
        return turned[:, :num_heads]

    def attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: AttentionMetadata,
        scale: float,
        window: int | None,
    ) -> Tensor:
        num_rows = q.shape[0]
        num_decodes = meta.num_decodes
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        if num_decodes > 0:
            reads = self._decode_reads(meta, k_cache, window)
            decoded = _decode(q[:num_decodes], k_cache, v_cache, reads, scale)
            if num_decodes == num_rows:
                return decoded.reshape(num_rows, -1)
            out[:num_decodes] = decoded
        if meta.context_lens.shape[0] > num_decodes:
            starts, lens = meta.query_starts.tolist(), meta.context_lens.tolist()
            for sequence in range(num_decodes, len(lens)):
                rows = slice(starts[sequence], starts[sequence + 1])
                if rows.start < rows.stop:
                    table = meta.block_tables[sequence]
                    out[rows] = _prefill(q[rows], k_cache, v_cache, table, lens[sequence], scale, window)
        return out.view(num_rows, -1)

    def _decode_reads(self, meta: AttentionMetadata, k_cache: Tensor, window: int | None) -> DecodeReads:
        if self._last is None or self._last[0] is not meta or self._last[1] != window:
            self._last = (meta, window, _decode_reads(meta, k_cache, window))
        return self._last[2]

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def experts(
        self,
        x: Tensor,
        router_logits: Tensor,
        gate_up: Weight,
        down: Weight,
        top_k: int,
        renormalise: bool,
        slots: Tensor,
    ) -> Tensor:
        num_experts = router_logits.shape[1]
        weights, chosen = torch.topk(torch.softmax(router_logits.float(), dim=-1), top_k, dim=-1)
        if renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        # Padding rows go to an expert past the last, which no loop visits.
        chosen = chosen.masked_fill((slots < 0).unsqueeze(1), num_experts).flatten()
        pairs = torch.argsort(chosen, stable=True)
        rows = pairs // top_k
        pair_weights = weights.flatten()[pairs].unsqueeze(1)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        start = 0
        for expert, count in enumerate(torch.bincount(chosen, minlength=num_experts)[:num_experts].tolist()):
            if count:
                hit = slice(start, start + count)
                hidden = self.silu_and_mul(F.linear(x[rows[hit]], _matrix(gate_up, expert, x.dtype)))
                product = F.linear(hidden, _matrix(down, expert, x.dtype))
                out.index_add_(0, rows[hit], product * pair_weights[hit])
                start += count
        return out.to(x.dtype)

    def kept_encoding(self, stored: Encoding, dtype: torch.dtype) -> Encoding | None:
        return stored if self._keeps_fp8 else None

    def scaled_linear(self, x: Tensor, weight: ScaledWeight, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight.widened(x.dtype), bias)

    def greedy(self, logits: Tensor) -> Tensor:
        return logits.argmax(dim=-1).to(torch.int32)

    def sample(self, logits: Tensor, sampling: SamplingTensors) -> Tensor:
        is_random = sampling.temperatures > 0
        scaled = logits.float() / torch.where(is_random, sampling.temperatures, 1.0).unsqueeze(1)
        if sampling.top_ks is not None:
            scaled = _keep_top_k(scaled, sampling.top_ks)
        probabilities = torch.softmax(scaled, dim=-1)
        if sampling.top_ps is not None:
            probabilities = _keep_top_p(probabilities, sampling.top_ps)
        if sampling.min_ps is not None:
            least = sampling.min_ps.unsqueeze(1) * probabilities.amax(-1, keepdim=True)
            probabilities = probabilities.masked_fill(probabilities < least, 0.0)
        # float64, so that the sum over a vocabulary does not lose the tail's tokens.
        cumulative = probabilities.double().cumsum(-1)
        targets = sampling.uniforms.double().unsqueeze(1) * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
        # A row that holds nothing but -inf, or any NaN, has no distribution; its id is still an id.
        drawn = drawn.clamp(max=logits.shape[1] - 1)
        return torch.where(is_random, drawn, logits.argmax(dim=-1)).to(torch.int32)


def _matrix(stack: Weight, index: int, dtype: torch.dtype) -> Tensor:
    return stack.matrix(index).widened(dtype) if isinstance(stack, ScaledWeight) else stack[index]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [T, heads, D]; cos, sin: [T, 1, D / 2] float32. One rounding, at the end."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _write(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Put keys and values [T, Hkv, D] into their slots; padding rows (slot -1) write nothing."""
    is_kept = slots >= 0
    if slots.device.type == "cpu":
        if not bool(is_kept.all()):
            slots, k, v = slots[is_kept], k[is_kept], v[is_kept]
        for cache, new in ((k_cache, k), (v_cache, v)):
            cache.flatten(0, 1).index_copy_(0, slots.long(), new)
        return
    # Without asking the device how many rows are kept: padding rows repeat the first kept row's write, and if no row is
    # kept they write back what is there.
    source = torch.where(is_kept, torch.arange(slots.shape[0], device=slots.device), is_kept.int().argmax())
    targets = slots[source].clamp(min=0).long()
    for cache, new in ((k_cache, k), (v_cache, v)):
        flat = cache.flatten(0, 1)
        flat.index_copy_(0, targets, torch.where(is_kept[source][:, None, None], new[source], flat[targets]))


@dataclass(frozen=True, slots=True)
class DecodeReads:
    """Where n decoding sequences find their keys, padded to the longest."""

    slots: Tensor
    """[n * longest]"""
    is_seen: Tensor | None
    """[n, 1, 1, longest]; None: all of them."""
    longest: int


def _decode_reads(meta: AttentionMetadata, k_cache: Tensor, window: int | None) -> DecodeReads:
    n, block_tokens = meta.num_decodes, k_cache.shape[1]
    lens = meta.context_lens[:n].clamp(min=1).unsqueeze(1)
    on_host = lens.device.type == "cpu"
    longest = int(lens.max()) if on_host else meta.max_context_len
    positions = torch.arange(longest, device=lens.device, dtype=torch.int32).unsqueeze(0)
    # Past a sequence's end its last token is read again, and masked: unwritten slots may hold anything, NaN included.
    nearest = torch.minimum(positions, lens - 1).long()
    blocks = meta.block_tables[:n].gather(1, nearest // block_tokens)
    # A graph's padding sequences have no blocks, so theirs may be any number.
    slots = (blocks.clamp(0, k_cache.shape[0] - 1) * block_tokens + nearest % block_tokens).flatten()
    is_seen = positions < lens
    if window is not None:
        is_seen &= positions >= lens - window
    if on_host and bool(is_seen.all()):
        return DecodeReads(slots, None, longest)
    return DecodeReads(slots, is_seen[:, None, None, :], longest)


def _decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, reads: DecodeReads, scale: float) -> Tensor:
    """One query per sequence, [n, Hq, D], all sequences padded to the longest and computed as one batch."""
    num_sequences, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    shape = (num_sequences, reads.longest, num_kv_heads, head_dim)
    k = k_cache.flatten(0, 1).index_select(0, reads.slots).view(shape).transpose(1, 2)
    v = v_cache.flatten(0, 1).index_select(0, reads.slots).view(shape).transpose(1, 2)
    # The query heads that share a key head stand where SDPA expects query rows, so no key is repeated.
    grouped = q.reshape(num_sequences, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=reads.is_seen, scale=scale)
    return out.reshape(q.shape)


def _prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    context_len: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """The last rows [L, Hq, D] of one sequence's `context_len` tokens."""
    num_rows, num_heads, head_dim = q.shape
    block_tokens, num_kv_heads = k_cache.shape[1:3]
    first_row = context_len - num_rows
    first_block = max(0, first_row - window + 1) // block_tokens if window is not None else 0
    blocks = table[first_block : -(-context_len // block_tokens)]
    first_key = first_block * block_tokens
    num_keys = context_len - first_key
    group = num_heads // num_kv_heads
    shape = (num_kv_heads, group, num_keys, head_dim)
    k = k_cache[blocks].flatten(0, 1)[:num_keys].transpose(0, 1).unsqueeze(1).expand(shape)
    v = v_cache[blocks].flatten(0, 1)[:num_keys].transpose(0, 1).unsqueeze(1).expand(shape)
    grouped = q.view(num_rows, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    if first_row == 0 and window is None:
        out = F.scaled_dot_product_attention(grouped, k, v, is_causal=True, scale=scale)
    else:
        rows = torch.arange(first_row, context_len, device=q.device).unsqueeze(1)
        keys = torch.arange(first_key, context_len, device=q.device).unsqueeze(0)
        is_seen = keys <= rows
        if window is not None:
            is_seen &= keys > rows - window
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=is_seen, scale=scale)
    return out.permute(2, 0, 1, 3).reshape(q.shape)


def _keep_top_k(logits: Tensor, top_ks: Tensor) -> Tensor:
    """Drop what is below the k-th largest logit of each row; a k of 0 keeps the row whole."""
    vocabulary = logits.shape[1]
    counts = torch.where(top_ks > 0, top_ks, vocabulary).clamp(max=vocabulary)
    most = int(torch.where(top_ks > 0, counts, 1).max())
    largest = torch.topk(logits, most, dim=-1).values
    threshold = largest.gather(1, (counts.clamp(max=most) - 1).long().unsqueeze(1))
    threshold = threshold.masked_fill((top_ks <= 0).unsqueeze(1), -torch.inf)
    return logits.masked_fill(logits < threshold, -torch.inf)


def _keep_top_p(probabilities: Tensor, top_ps: Tensor) -> Tensor:
    """Keep the tokens that less than top_p of the mass is more probable than; 1 keeps the row whole.

    probabilities: [R, V], summing to one.
    """
    limits = top_ps.unsqueeze(1)
    descending = torch.topk(probabilities, min(_FEW_CANDIDATES, probabilities.shape[1]), dim=-1).values
    if bool(((descending.sum(-1, keepdim=True) <= limits) & (limits < 1)).any()):
        descending = probabilities.sort(dim=-1, descending=True).values
    ahead = descending.double().cumsum(-1) - descending
    # The first token always has nothing ahead of it, so a top_p of 0 keeps the most probable one.
    num_kept = (ahead < limits).sum(-1, keepdim=True).clamp(min=1)
    threshold = descending.gather(1, num_kept - 1).masked_fill(limits >= 1, 0.0)
    return probabilities.masked_fill(probabilities < threshold, 0.0)
