"""The floats say what the equations say."""

import numpy as np
import pytest

from bimetal.catalog.hardware import cpu_spec, find_gpu
from bimetal.catalog.models import builtin_model
from bimetal.perf.equations import prefill_s
from bimetal.perf.stage_clock import stage_clock
from bimetal.perf.step_time import StageShape, coefficients_of, decode_step
from bimetal.perf.work import count_work

SHAPES = [
    StageShape(builtin_model("Llama-3.1-70B"), 0, 80, find_gpu("H100"), 4, "float8"),
    StageShape(builtin_model("Llama-3.1-70B"), 40, 80, find_gpu("MI300X"), 1),
    StageShape(builtin_model("Mixtral-8x7B"), 0, 16, find_gpu("B200"), 2, "float4"),
    StageShape(builtin_model("Llama-3.1-8B"), 0, 32, cpu_spec(), 1, "float32"),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("num_seqs", "context"), [(1, 100), (16, 1000), (128, 4000)])
def test_decode_steps_agree(shape, num_seqs, context):
    clock = stage_clock(shape)
    expected = decode_step(shape, num_seqs, context).step_s
    assert clock.step_s(num_seqs, num_seqs * context) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_agree_however_they_are_cut(shape):
    clock = stage_clock(shape)
    work, c = count_work([shape.point(1, 1)]), coefficients_of([shape])
    whole = float(prefill_s(work, c, np.array([3000.0]))[0])
    pieces = [(1000, 1000 * 500), (2000, 2000 * (1000 + 1000))]
    total = sum(n * clock.prompt_token_s + pairs * clock.score_s for n, pairs in pieces) + clock.prompt_s
    assert total == pytest.approx(whole, rel=1e-6)
