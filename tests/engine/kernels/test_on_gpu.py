"""On a GPU: the Triton kernels agree with the torch reference, and replay from a graph."""

import pytest
import torch
from kernel_agreement import CASES, TOLERANCES, errors

from bimetal.engine.kernels.triton_kernels import TritonKernels, device_architecture

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.fixture(scope="module")
def kernels() -> TritonKernels:
    return TritonKernels(device_architecture(torch.device("cuda")))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_reference(name: str, dtype: torch.dtype, kernels: TritonKernels) -> None:
    assert errors(kernels, torch.device("cuda"), dtype, [name])[name] <= TOLERANCES[dtype]


def test_a_graph_follows_its_inputs(kernels: TritonKernels) -> None:
    """Experts choose on the device: a captured call routes new rows by their new logits."""
    x, gate_up, down = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16) / 8
        for shape in ((24, 128), (8, 192, 128), (8, 128, 96))
    )
    logits = torch.randn(24, 8, device="cuda")
    slots = torch.arange(24, device="cuda", dtype=torch.int32)
    kernels.experts(x, logits, gate_up, down, 2, True, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.experts(x, logits, gate_up, down, 2, True, slots)
    for _ in range(3):
        logits.copy_(torch.randn(24, 8, device="cuda"))
        x.copy_(torch.randn(24, 128, device="cuda"))
        graph.replay()
        assert torch.equal(out, kernels.experts(x, logits, gate_up, down, 2, True, slots))
