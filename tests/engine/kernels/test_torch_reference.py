"""The reference kernels against the formulas themselves, in float64."""

import math

import pytest
import torch

from bimetal.engine.kernels.interface import AttentionMetadata, SamplingTensors
from bimetal.engine.kernels.torch_reference import TorchKernels

KERNELS = TorchKernels()
EMPTY = torch.empty(0, dtype=torch.int32)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, limit: float = 2e-6) -> None:
    assert ((actual.double() - expected).abs().max() / expected.abs().max()).item() < limit


def test_rms_norm() -> None:
    x, weight = torch.randn(5, 3, 48), torch.randn(48)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert_close(KERNELS.rms_norm(x, weight, 1e-5), expected)


def test_rms_norm_rounds_before_it_scales() -> None:
    """As Llama's own code does: the normalised row is rounded to bfloat16, then multiplied in bfloat16."""
    x, weight = torch.randn(4, 64).bfloat16(), torch.randn(64).bfloat16()
    wide = x.float()
    normalised = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()
    assert torch.equal(KERNELS.rms_norm(x, weight, 1e-6), weight * normalised)


def test_add_rms_norm_keeps_the_sum() -> None:
    x, residual, weight = torch.randn(4, 32), torch.randn(4, 32), torch.randn(32)
    out, total = KERNELS.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(out, KERNELS.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("has_norm", [False, True])
def test_rotary_turns_pairs_and_writes_only_kept_rows(has_norm: bool) -> None:
    heads, kv_heads, head_dim = 6, 2, 16
    qkv = torch.randn(4, (heads + 2 * kv_heads) * head_dim)
    angles = torch.rand(32, head_dim // 2, dtype=torch.float64) * 9
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).float()
    positions, slots = ints(0, 7, 31, 3), ints(5, -1, 9, 0)
    k_cache, v_cache = (torch.full((3, 4, kv_heads, head_dim), 7.0) for _ in range(2))
    norms = [torch.rand(head_dim) if has_norm else None for _ in range(2)]
    meta = AttentionMetadata(positions, slots, EMPTY, EMPTY, EMPTY, 0, 0, 0)
    q = KERNELS.rotary_and_cache(qkv, cos_sin, k_cache, v_cache, meta, *norms, 1e-6)

    def turned(x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        x = x.double()
        if norm is not None:
            x = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm
        pairs = torch.complex(x[..., : head_dim // 2], x[..., head_dim // 2 :])
        pairs = pairs * torch.polar(torch.ones_like(angles), angles)[positions.long()].unsqueeze(1)
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    rows = qkv.view(4, -1, head_dim)
    assert_close(q, turned(rows[:, :heads], norms[0]))
    kept = torch.tensor([0, 2, 3])
    assert_close(k_cache.flatten(0, 1)[slots[kept].long()], turned(rows[:, heads:-kv_heads], norms[1])[kept])
    assert torch.equal(v_cache.flatten(0, 1)[slots[kept].long()], rows[kept, -kv_heads:])
    untouched = [slot for slot in range(12) if slot not in (5, 9, 0)]
    assert (k_cache.flatten(0, 1)[untouched] == 7).all()
    assert (v_cache.flatten(0, 1)[untouched] == 7).all()


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("num_decodes", [0, 3])
def test_attention(window: int | None, group: int, num_decodes: int) -> None:
    """Slots that no token was written to hold NaN; tables end in blocks that do not exist."""
    kv_heads, head_dim, block_tokens = 2, 16, 4
    contexts, queries = [1, 13, 30, 9, 20], [1, 1, 1, 9, 7]
    tables = torch.randperm(40).view(5, 8)
    k_cache, v_cache = (torch.full((40, block_tokens, kv_heads, head_dim), float("nan")) for _ in range(2))
    for sequence, context in enumerate(contexts):
        for position in range(context):
            slot = tables[sequence, position // block_tokens], position % block_tokens
            k_cache[slot], v_cache[slot] = torch.randn(2, kv_heads, head_dim)
        tables[sequence, -(-context // block_tokens) :] = 10**6
    q = torch.randn(sum(queries), kv_heads * group, head_dim)
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    meta = AttentionMetadata(EMPTY, EMPTY, starts, ints(*contexts), tables.int(), num_decodes, 9, 30)
    out = KERNELS.attention(q, k_cache, v_cache, meta, 0.3, window)

    expected = torch.empty(q.shape, dtype=torch.float64)
    for sequence, context in enumerate(contexts):
        blocks = tables[sequence, : -(-context // block_tokens)]
        k, v = (cache[blocks].flatten(0, 1)[:context].double() for cache in (k_cache, v_cache))
        for row in range(int(starts[sequence]), int(starts[sequence + 1])):
            position = context - int(starts[sequence + 1]) + row
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(kv_heads * group):
                seen_k, seen_v = (x[first : position + 1, head // group] for x in (k, v))
                expected[row, head] = (seen_k @ q[row, head].double() * 0.3).softmax(0) @ seen_v
    assert_close(out, expected.flatten(1))


def test_silu_and_mul() -> None:
    gate_up = torch.randn(3, 20)
    gate, up = gate_up.double().chunk(2, dim=1)
    assert_close(KERNELS.silu_and_mul(gate_up), gate / (1 + (-gate).exp()) * up)


@pytest.mark.parametrize("renormalise", [False, True])
def test_experts(renormalise: bool) -> None:
    num_experts, top_k, hidden, inner = 6, 3, 16, 24
    x, logits = torch.randn(7, hidden), torch.randn(7, num_experts)
    gate_up, down = torch.randn(num_experts, 2 * inner, hidden), torch.randn(num_experts, hidden, inner)
    slots = ints(0, 1, -1, 3, 4, 5, 6)
    out = KERNELS.experts(x, logits, gate_up, down, top_k, renormalise, slots)
    expected = torch.zeros(7, hidden, dtype=torch.float64)
    for row in range(7):
        probabilities = logits[row].double().softmax(0)
        chosen = probabilities.argsort(descending=True)[:top_k]
        for expert in chosen:
            gate, up = (gate_up[expert].double() @ x[row].double()).chunk(2)
            weight = probabilities[expert] / (probabilities[chosen].sum() if renormalise else 1.0)
            expected[row] += weight * (down[expert].double() @ (gate / (1 + (-gate).exp()) * up))
    kept = slots >= 0
    assert_close(out[kept], expected[kept])


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, -1.0, 5.0, 5.0]])
    assert KERNELS.greedy(logits).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "kept"),
    [
        (None, None, None, [0, 1, 2, 3, 4]),
        (2, None, None, [1, 2, 3]),  # 2 and 3 are tied at the boundary
        (0, None, None, [0, 1, 2, 3, 4]),
        (None, 0.39, None, [1]),
        (None, 0.41, None, [1, 2, 3]),
        (None, 0.0, None, [1]),
        (None, 1.0, None, [0, 1, 2, 3, 4]),
        (None, None, 0.3, [0, 1, 2, 3]),
        (3, 0.45, 0.0, [1]),  # half of what top_k leaves
        (3, 0.55, 0.0, [1, 2, 3]),
        (None, 0.999, 0.6, [1]),
    ],
)
def test_sampling_draws_the_filtered_distribution(
    top_k: int | None, top_p: float | None, min_p: float | None, kept: list[int]
) -> None:
    probabilities = torch.tensor([0.15, 0.4, 0.2, 0.2, 0.05])
    rows = 10_000
    tensors = SamplingTensors(
        temperatures=torch.full((rows,), 0.5),
        uniforms=(torch.arange(rows) + 0.5) / rows,
        top_ks=None if top_k is None else torch.full((rows,), top_k, dtype=torch.int32),
        top_ps=None if top_p is None else torch.full((rows,), top_p),
        min_ps=None if min_p is None else torch.full((rows,), min_p),
    )
    drawn = KERNELS.sample((probabilities.log() / 2).expand(rows, -1), tensors)
    # The inverse of the cumulative distribution, in order of token id.
    assert torch.equal(drawn, drawn.sort().values)
    shares = torch.bincount(drawn, minlength=5) / rows
    expected = torch.zeros(5)
    expected[kept] = probabilities[kept] / probabilities[kept].sum()
    assert (shares - expected).abs().max() < 2 / rows


def test_sampling_sorts_the_vocabulary_where_few_candidates_do_not_suffice() -> None:
    vocabulary = 1500
    probabilities = torch.softmax(torch.randn(vocabulary) * 0.1, 0)
    rows = vocabulary * 2
    tensors = SamplingTensors(
        torch.ones(rows), (torch.arange(rows) + 0.5) / rows, None, torch.full((rows,), 0.7), None
    )
    drawn = KERNELS.sample(probabilities.log().expand(rows, -1), tensors).unique()
    order = probabilities.argsort(descending=True)
    num_kept = int((probabilities[order].double().cumsum(0) - probabilities[order] < 0.7).sum())
    assert set(drawn.tolist()) <= set(order[:num_kept].tolist())
    assert len(drawn) > 0.9 * num_kept
    assert math.isclose(probabilities[drawn.long()].sum().item(), 0.7, abs_tol=0.02)


def test_a_temperature_of_zero_is_greedy() -> None:
    logits = torch.randn(4, 9)
    tensors = SamplingTensors(ints(0, 1, 0, 1).float(), torch.rand(4), ints(5, 5, 5, 5), None, None)
    out = KERNELS.sample(logits, tensors)
    assert out[[0, 2]].tolist() == logits.argmax(1)[[0, 2]].tolist()
