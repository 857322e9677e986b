"""`TritonKernels`: the kernels' contract (`interface.Kernels`) as Triton programs, one source for CUDA and ROCm.

It sizes grids, takes workspaces from torch's caching allocator and launches through the registry; nothing here waits
for the device or depends on its data, so every call may be captured in a graph (after one call outside, which compiles
and loads the programs). `programs/` holds the device code, with a note on what bounds each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from bimetal.engine.kernels.architecture import Architecture, architecture_named
from bimetal.engine.kernels.encoding import Encoding, ScaledWeight, Weight
from bimetal.engine.kernels.interface import AttentionMetadata, SamplingTensors, Tensor
from bimetal.engine.kernels.registry import Launcher, Program, Rule
from bimetal.engine.kernels.specs import SPECS
from bimetal.engine.kernels.triton_scaled import ScaledProducts, scale_arguments
from bimetal.errors import ConfigError

BLOCK_TOKENS = 64
"""Tokens in a KV block that the attention programs are compiled for: a tile of keys lies in one block, so its address is
one table entry, and a sequence wastes 32 tokens on average."""

_DECODE_PROGRAMS_PER_MULTIPROCESSOR = 2
"""Long sequences are cut until about so many programs share the keys; more cost more in joining than they gain in
balance (H200)."""


def device_architecture(device: torch.device) -> Architecture:
    """Raises ConfigError for a GPU that no kernel is listed for."""
    if torch.version.hip is not None:
        return architecture_named(torch.cuda.get_device_properties(device).gcnArchName)
    major, minor = torch.cuda.get_device_capability(device)
    return architecture_named(f"sm_{major}{minor}")


class TritonKernels:
    """`interface.Kernels` on one GPU. Caches must hold `BLOCK_TOKENS` tokens a block, dense within a block."""

    def __init__(self, architecture: Architecture, rules: Sequence[Rule] | None = None) -> None:
        """`rules` other than the architecture's own serve measurements of what to list there."""
        self._launcher = Launcher(SPECS, architecture, rules)
        self._scaled = ScaledProducts(self._launcher)
        self._arrivals: dict[int, Tensor] = {}

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        self._norm(out, None, x, None, weight, eps)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out, total = torch.empty_like(x), torch.empty_like(x)
        self._norm(out, total, x, residual, weight, eps)
        return out, total

    def _norm(
        self,
        out: Tensor,
        total: Tensor | None,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
    ) -> None:
        columns = x.shape[-1]
        block = max(1024, _power_of_two(columns))
        program = self._launcher.program(
            "rms_norm", x.dtype, HAS_RESIDUAL=int(residual is not None), BLOCK=block
        )
        program((x.numel() // columns, 1, 1), out, total, x, residual, weight, columns, eps)

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
        num_rows = qkv.shape[0]
        block_tokens, num_kv_heads, head_dim = k_cache.shape[1:]
        num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
        q = torch.empty((num_rows, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
        program = self._launcher.program(
            "rotary_and_cache",
            qkv.dtype,
            HEAD_DIM=head_dim,
            BLOCK_TOKENS=block_tokens,
            HAS_NORM=int(q_norm is not None),
        )
        heads = program.tile["BLOCK_HEADS"]
        tiles = _ceil_div(num_heads, heads) + 2 * _ceil_div(num_kv_heads, heads)
        program(
            (num_rows, tiles, 1),
            *(q, k_cache, v_cache, qkv, cos_sin, meta.positions, meta.slots, q_norm, k_norm),
            *(num_heads, num_kv_heads, k_cache.stride(0), v_cache.stride(0), eps),
        )
        return q

    def attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: AttentionMetadata,
        scale: float,
        window: int | None,
    ) -> Tensor:
        num_rows, num_heads, head_dim = q.shape
        out = torch.empty((num_rows, num_heads * head_dim), dtype=q.dtype, device=q.device)
        if meta.num_decodes > 0:
            self._decode(out, q, k_cache, v_cache, meta, scale, window)
        if meta.context_lens.shape[0] > meta.num_decodes:
            self._prefill(out, q, k_cache, v_cache, meta, scale, window)
        return out

    def _decode(
        self,
        out: Tensor,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: AttentionMetadata,
        scale: float,
        window: int | None,
    ) -> None:
        num_sequences = meta.num_decodes
        num_heads, head_dim = q.shape[1:]
        block_tokens, num_kv_heads = k_cache.shape[1:3]
        program = self._launcher.program(
            "paged_attention",
            q.dtype,
            num_sequences,
            HEAD_DIM=head_dim,
            BLOCK_TOKENS=block_tokens,
            IS_DECODE=1,
        )
        programs = _DECODE_PROGRAMS_PER_MULTIPROCESSOR * self._launcher.architecture.num_multiprocessors
        extra_items = _ceil_div(programs, num_kv_heads)
        num_items = num_sequences + extra_items
        partial_out = torch.empty((num_items, num_heads, head_dim), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty((num_items, num_heads), dtype=torch.float32, device=q.device)
        program(
            (num_kv_heads, num_items, 1),
            *(
                out,
                partial_out,
                partial_lse,
                self._arrivals_of(program.tile["BLOCK_SEQUENCES"] * num_kv_heads, q),
            ),
            *(q, k_cache, v_cache, *_cache_tiles(program, k_cache, v_cache)),
            *(meta.block_tables, meta.query_starts, meta.context_lens, num_sequences, num_sequences),
            *(meta.block_tables.stride(0), k_cache.stride(0), v_cache.stride(0), num_heads // num_kv_heads),
            *(num_kv_heads, window or 0, extra_items, scale * math.log2(math.e)),
        )

    def _arrivals_of(self, number: int, like: Tensor) -> Tensor:
        """Counters that every launch leaves at zero, so that none has to clear them; launches on one device must not
        overlap."""
        if number not in self._arrivals:
            self._arrivals[number] = torch.zeros(number, dtype=torch.int32, device=like.device)
        return self._arrivals[number]

    def _prefill(
        self,
        out: Tensor,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: AttentionMetadata,
        scale: float,
        window: int | None,
    ) -> None:
        num_heads, head_dim = q.shape[1:]
        block_tokens, num_kv_heads = k_cache.shape[1:3]
        group = num_heads // num_kv_heads
        program = self._launcher.program(
            "paged_attention",
            q.dtype,
            meta.max_query_len * group,
            HEAD_DIM=head_dim,
            BLOCK_TOKENS=block_tokens,
            IS_DECODE=0,
        )
        num_sequences = meta.context_lens.shape[0]
        tile_tokens = program.tile["BLOCK_M"] // group
        tiles = (q.shape[0] - meta.num_decodes) // tile_tokens + num_sequences - meta.num_decodes
        program(
            (num_kv_heads, tiles, 1),
            *(out, None, None, None, q, k_cache, v_cache, *_cache_tiles(program, k_cache, v_cache)),
            *(meta.block_tables, meta.query_starts, meta.context_lens, meta.num_decodes, num_sequences),
            *(meta.block_tables.stride(0), k_cache.stride(0), v_cache.stride(0), group),
            *(num_kv_heads, window or 0, 1, scale * math.log2(math.e)),
        )

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        num_rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((num_rows, columns), dtype=gate_up.dtype, device=gate_up.device)
        program = self._launcher.program("silu_and_mul", gate_up.dtype)
        program((num_rows, _ceil_div(columns, program.tile["BLOCK"]), 1), out, gate_up, columns)
        return out

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
        num_rows, hidden = x.shape
        num_experts = router_logits.shape[1]
        inner = (down.payload if isinstance(down, ScaledWeight) else down).shape[2]
        num_pairs = num_rows * top_k
        rows_per_expert = _ceil_div(num_pairs, num_experts)
        if isinstance(gate_up, ScaledWeight):
            first, second = self._scaled.expert_programs(x.dtype, rows_per_expert)
        else:
            first = self._launcher.program("expert_gate_up", x.dtype, rows_per_expert)
            second = self._launcher.program("expert_down", x.dtype, rows_per_expert)
        tile_rows = first.tile["BLOCK_M"]
        # Every expert that is hit may end in a tile that is not full.
        most_hit = min(num_experts, num_pairs)
        num_tiles = most_hit + (num_pairs - most_hit) // tile_rows

        indices = torch.empty(3 * num_pairs + 3 * num_tiles, dtype=torch.int32, device=x.device)
        chosen, ranks, order, tiles = torch.split(indices, [num_pairs, num_pairs, num_pairs, 3 * num_tiles])
        counts = torch.zeros(num_experts, dtype=torch.int32, device=x.device)
        weights = torch.empty(num_pairs, dtype=torch.float32, device=x.device)
        block_experts = max(16, _power_of_two(num_experts))
        route = self._launcher.program(
            "route", router_logits.dtype, RENORMALISE=int(renormalise), BLOCK_EXPERTS=block_experts
        )
        route(
            (_ceil_div(num_rows, route.tile["BLOCK_ROWS"]), 1, 1),
            *(chosen, ranks, weights, counts, router_logits, slots, num_rows, num_experts, top_k),
        )
        place = self._launcher.program("place", torch.float32, BLOCK_EXPERTS=block_experts)
        place(
            (_ceil_div(max(num_pairs, num_tiles), place.tile["BLOCK_PAIRS"]), 1, 1),
            *(order, tiles, chosen, ranks, counts, num_pairs, num_experts, num_tiles, tile_rows),
        )
        activated = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
        grid = (num_tiles * _ceil_div(inner, first.tile["BLOCK_N"]), 1, 1)
        where = (order, tiles, num_tiles, hidden, inner)
        if isinstance(gate_up, ScaledWeight):
            operands = (activated, x, gate_up.payload, gate_up.scale)
            first(grid, *operands, *where, top_k, *scale_arguments(gate_up))
        else:
            first(grid, activated, x, gate_up, _tiles(first, gate_up, "BLOCK_N", "BLOCK_K"), *where, top_k)
        pairs = torch.empty((num_pairs, hidden), dtype=x.dtype, device=x.device)
        grid = (num_tiles * _ceil_div(hidden, second.tile["BLOCK_N"]), 1, 1)
        if isinstance(down, ScaledWeight):
            second(grid, pairs, activated, down.payload, down.scale, *where, *scale_arguments(down))
        else:
            read = (
                _tiles(second, activated, "BLOCK_M", "BLOCK_K"),
                _tiles(second, down, "BLOCK_N", "BLOCK_K"),
            )
            second(grid, pairs, activated, down, *read, *where)
        out = torch.empty_like(x)
        add = self._launcher.program("weighted_sum", x.dtype)
        add(
            (num_rows, _ceil_div(hidden, add.tile["BLOCK"]), 1),
            *(out, pairs, weights, slots, hidden, top_k),
        )
        return out

    def kept_encoding(self, stored: Encoding, dtype: torch.dtype) -> Encoding | None:
        return self._scaled.kept_encoding(stored, dtype)

    def scaled_linear(self, x: Tensor, weight: ScaledWeight, bias: Tensor | None) -> Tensor:
        return self._scaled.linear(x, weight, bias)

    def greedy(self, logits: Tensor) -> Tensor:
        logits = _padded_rows(logits)
        out = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
        program = self._launcher.program("greedy", logits.dtype)
        program((logits.shape[0], 1, 1), out, logits, logits.shape[1], logits.stride(0))
        return out

    def sample(self, logits: Tensor, sampling: SamplingTensors) -> Tensor:
        logits = _padded_rows(logits)
        out = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
        filters = (sampling.top_ks, sampling.top_ps, sampling.min_ps)
        program = self._launcher.program("sample", logits.dtype)
        num_segments = program.tile["SEGMENTS"]
        most = num_segments * program.tile["SEGMENT"]
        if logits.shape[1] > most:
            raise ConfigError(
                f"a vocabulary of {logits.shape[1]} tokens: the sampling kernel takes up to {most}. Raise its SEGMENTS in "
                f"engine/kernels/data/{self._launcher.architecture.name}.json"
            )
        sums = torch.empty((logits.shape[0], num_segments), dtype=torch.float32, device=logits.device)
        program(
            (logits.shape[0], 1, 1),
            *(out, sums, logits, sampling.temperatures, sampling.uniforms, *filters),
            *(logits.shape[1], logits.stride(0)),
            *(int(values is not None) for values in filters),
        )
        return out


def _tiles(program: Program, tensor: Tensor, rows: str, columns: str) -> Any:
    """A dense tensor's last two axes as a matrix that the copy engine reads in the program's tiles; None where it reads
    through pointers."""
    if not program.tile["HAS_DESCRIPTORS"]:
        return None
    matrix = tensor.view(-1, tensor.shape[-1])
    block = [program.tile[rows], program.tile[columns]]
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), block)


def _cache_tiles(program: Program, k_cache: Tensor, v_cache: Tensor) -> tuple[Any, Any]:
    if not program.tile["HAS_DESCRIPTORS"]:
        return None, None
    shape = [k_cache.shape[0] * k_cache.shape[1], k_cache.shape[2] * k_cache.shape[3]]
    block = [program.tile["BLOCK_N"], k_cache.shape[3]]
    return tuple(TensorDescriptor(cache, shape, [shape[1], 1], block) for cache in (k_cache, v_cache))


def _padded_rows(logits: Tensor) -> Tensor:
    """Rows of a multiple of 16 logits, as the programs read them; few vocabularies are not so already."""
    missing = -logits.shape[1] % 16
    if missing or logits.stride(0) % 16:
        return F.pad(logits, (0, missing), value=-torch.inf)
    return logits


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)
