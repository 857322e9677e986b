"""Products with FP8 weights: Triton's programs in its interpreter, and the call of the vendor's own product on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interpreting import interpret
from kernel_agreement import error
from remembered import remembered
from scaled_agreement import BY_ROW, CASES, scaled

from bimetal.engine.kernels.architecture import ARCHITECTURES
from bimetal.engine.kernels.choices import Choice, read_choices
from bimetal.engine.kernels.encoding import E4M3FN, E4M3FNUZ, Encoding, Tensor
from bimetal.engine.kernels.registry import Launcher, read_rules
from bimetal.engine.kernels.specs import SPECS
from bimetal.engine.kernels.triton_scaled import ScaledProducts

PROGRAM = Path(__file__).with_name("scaled_agreement.py")
TOLERANCES = {"float16": 1e-3, "bfloat16": 2e-2}
# The interpreter loses carries when it rounds to FP8 (`quantised_rows`), so a few numbers of a row are halved.
QUANTISED = {("bfloat16", "row"): 0.1, ("bfloat16", "row-many"): 0.1}


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest) -> dict[str, dict[str, float]]:
    """By dtype and case."""
    found: dict[str, dict[str, float]] = remembered(
        request.config, "scaled", lambda: interpret(PROGRAM, TOLERANCES)
    )
    return found


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_numbers_meant(name: str, dtype: str, errors: dict[str, dict[str, float]]) -> None:
    tolerance = 0.51 if name == "quantised-rows" else QUANTISED.get((dtype, name), TOLERANCES[dtype])
    assert errors[dtype][name] <= tolerance


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_agrees_on_the_gpu(name: str, dtype: torch.dtype) -> None:
    from bimetal.engine.kernels.triton_kernels import TritonKernels, device_architecture

    device = torch.device("cuda")
    torch.manual_seed(sum(name.encode()))
    found = CASES[name](TritonKernels(device_architecture(device)), device, dtype)
    # Rows in FP8 are off by 2^-4 of a number at most, and by 3% of the sum of many.
    assert found <= (0.51 if name == "quantised-rows" else 0.05 if name.startswith("row") else 1e-2)


def _products(architecture: str) -> ScaledProducts:
    return ScaledProducts(Launcher(SPECS, ARCHITECTURES[architecture]))


def _round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scales = x.float().abs().amax(1, keepdim=True) / 448
    return (x.float() / scales).to(E4M3FN), scales


def test_the_own_product_gets_rows_and_scales_the_right_way_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's CPU build multiplies FP8 too, so that layout and scales are checked without a GPU."""
    torch.manual_seed(0)
    products = _products("sm_90")
    monkeypatch.setattr(products, "quantise_rows", _round_rows)
    weight = scaled((48, 80), BY_ROW, torch.device("cpu"))
    x, bias = torch.randn(7, 80).bfloat16(), torch.randn(48).bfloat16()
    quantised, scales = _round_rows(x)
    expected = (quantised.float() * scales) @ weight.widened(torch.float32).T
    try:
        product = products.linear(x, weight, None)
    except RuntimeError as refusal:
        if "only supports per-tensor scaling for CPU" not in str(refusal):
            raise
        pytest.skip(f"torch {torch.__version__} has no such product on CPUs: {str(refusal)[-80:]}")
    assert error(product, expected) < 1e-2
    assert error(products.linear(x, weight, bias), expected + bias.float()) < 1e-2


def test_data_chooses_between_library_and_program(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [Choice("scaled_linear", "program", 4, ""), Choice("scaled_linear", "library", None, "")]
    products = ScaledProducts(Launcher(SPECS, ARCHITECTURES["sm_90"]), listed)
    took: list[str] = []
    for name in ("_multiply_in_fp8", "_multiply_widened"):
        monkeypatch.setattr(products, name, lambda x, weight, name=name: took.append(name))
    for rows, dtype, encoding in (
        (4, torch.bfloat16, BY_ROW),
        (5, torch.bfloat16, BY_ROW),
        (5, torch.float16, BY_ROW),
        (5, torch.bfloat16, Encoding(E4M3FN, 16, 128)),
    ):
        weight = scaled((48, 256), encoding, torch.device("cpu"))
        products.linear(torch.zeros(rows, 256, dtype=dtype), weight, None)
    assert took == ["_multiply_widened", "_multiply_in_fp8", "_multiply_widened", "_multiply_widened"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_data_says_where_it_comes_from(name: str) -> None:
    """What nobody measured says so: nothing has run on AMD's GPUs, nor any FP8 program anywhere."""
    rules, choices = read_rules(ARCHITECTURES[name]), read_choices(ARCHITECTURES[name])
    unmeasured = [rule for rule in rules if rule.source.startswith("Not measured yet")]
    measured = [rule for rule in rules if "benchmarks/" in rule.source]
    assert len(unmeasured) + len(measured) == len(rules)
    assert all(rule in unmeasured for rule in rules if rule.kernel.startswith(("scaled_", "quantise_")))
    assert bool(measured) == (name == "sm_90")
    assert [c.source.startswith("Not measured yet") for c in choices] == [True]


@pytest.mark.parametrize(
    ("architecture", "dtype"), [("sm_90", E4M3FN), ("gfx942", E4M3FNUZ), ("gfx950", E4M3FN)]
)
def test_weights_are_kept_in_the_encoding_that_the_target_takes(
    architecture: str, dtype: torch.dtype
) -> None:
    products = _products(architecture)
    assert products.kept_encoding(BY_ROW, torch.bfloat16) == Encoding(dtype)
    assert products.kept_encoding(Encoding(E4M3FN, 128, 128), torch.float16) == Encoding(dtype, 128, 128)
    assert products.kept_encoding(Encoding(E4M3FN, 128, 96), torch.bfloat16) is None
    assert products.kept_encoding(BY_ROW, torch.float32) is None
