"""The equations' limits, and that more of anything costs more."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bimetal.catalog.hardware import find_gpu
from bimetal.catalog.planned_models import planned_model
from bimetal.perf.equations import TERMS, closed_loop, decode_parts, offline, places, prefill_s, static_batch
from bimetal.perf.hierarchy import PRIORS
from bimetal.perf.point import ServingPoint
from bimetal.perf.work import count_work

POINT = ServingPoint(
    gpu=find_gpu("H100"),
    model=planned_model("Llama-3.1-70B"),
    engine="vllm",
    weight_format="float8",
    kv_bytes=2.0,
    tensor_parallel=4,
    input_tokens=1000,
    output_tokens=500,
    regime="closed-loop",
    concurrency=16,
)


def typical(size=1):
    return {term: np.full(size, PRIORS[term].typical) for term in TERMS}


def serve(equation, **changes):
    return equation(count_work([replace(POINT, **changes)]), typical())


def test_every_term_has_a_prior_and_every_prior_a_term():
    biases = {"tpot_bias", "ttft_bias", "rate_bias"}
    assert set(TERMS) | biases == set(PRIORS)


@pytest.mark.parametrize(
    "changes",
    [
        {"concurrency": 32},
        {"input_tokens": 4000},
        {"weight_format": "bfloat16"},
        {"tensor_parallel": 2},
        {"gpu": find_gpu("A100")},
        {"model": planned_model("Llama-3.1-405B"), "tensor_parallel": 8},
    ],
)
def test_more_work_or_less_machine_is_slower(changes):
    base, worse = serve(closed_loop), serve(closed_loop, **changes)
    assert worse.tpot_s[0] > base.tpot_s[0]
    assert worse.ttft_s[0] > base.ttft_s[0]


def test_more_requests_give_more_throughput_until_the_cache_is_full():
    rates = [serve(closed_loop, concurrency=float(c)).output_tokens_per_s[0] for c in (1, 4, 16, 64, 256)]
    assert rates == sorted(rates)
    crowded = serve(closed_loop, concurrency=4000.0, tensor_parallel=2)
    held = places(count_work([replace(POINT, tensor_parallel=2)]), np.array([1000 + 0.7 * 500]))
    assert crowded.num_seqs[0] <= held[0]
    assert crowded.ttft_s[0] > 60  # most of the 4,000 wait


def test_two_meshed_gpus_share_one_link_and_eight_have_all():
    for gpu, factor in (("MI300X", 7), ("H100", 1)):
        two, eight = count_work(
            [replace(POINT, gpu=find_gpu(gpu), tensor_parallel=n) for n in (2, 8)]
        ).group_bytes_per_s
        assert eight / two == pytest.approx(factor)


def test_prefill_is_linear_plus_attention():
    work, c = count_work([POINT]), typical()
    one, two, four = (prefill_s(work, c, np.array([n]))[0] for n in (1000.0, 2000.0, 4000.0))
    assert two > 2 * one - c["prompt_s"][0]
    assert four - 2 * two + c["prompt_s"][0] == pytest.approx(
        4 * (two - 2 * one + c["prompt_s"][0]), rel=1e-6
    )


def test_windows_bound_the_cache_that_is_read():
    model = planned_model("gpt-oss-120b")
    work = count_work([replace(POINT, model=model, weight_format="mxfp4")])
    n = np.array([8.0])
    short, long, longer = (
        decode_parts(work, typical(), n, np.array([s])).cache_s[0] for s in (128.0, 1128.0, 2128.0)
    )
    assert longer - long == pytest.approx(long - short)
    assert long - short == pytest.approx(
        short / 2 / 128 * 1000
    )  # only half the layers see more than the window


def test_a_static_batch_is_prefill_then_steps():
    batch = serve(static_batch, regime="static-batch")
    seconds = 16 * 500 / batch.output_tokens_per_s[0]
    assert seconds == pytest.approx(batch.ttft_s[0] + 499 * batch.tpot_s[0], rel=1e-6)


def test_arrivals_bound_the_rate():
    free = serve(offline, regime="server", concurrency=None)
    slow = serve(offline, regime="server", concurrency=None, arrivals_per_s=0.5)
    assert slow.output_tokens_per_s[0] == pytest.approx(0.5 * 500)
    assert free.output_tokens_per_s[0] > 1000


@given(st.floats(1, 512), st.floats(16, 30000), st.floats(2, 8000), st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=60, deadline=None)
def test_every_number_is_finite_and_positive(concurrency, inputs, outputs, ranks):
    point = replace(
        POINT, concurrency=concurrency, input_tokens=inputs, output_tokens=outputs, tensor_parallel=ranks
    )
    for equation in (closed_loop, static_batch, offline):
        serving = equation(count_work([point]), typical())
        for value in (serving.tpot_s, serving.ttft_s, serving.output_tokens_per_s):
            assert np.isfinite(value).all()
            assert (value > 0).all()
