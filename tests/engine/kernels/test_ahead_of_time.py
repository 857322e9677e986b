"""Every listed program compiles for its architecture, without a GPU, within that architecture's limits."""

import dataclasses
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from compile_reports import listed, report
from remembered import remembered

from bimetal.engine.kernels.architecture import ARCHITECTURES
from bimetal.engine.kernels.specs import SPECS


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1), get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize("kernel", SPECS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_listed_programs_fit_their_architecture(
    architecture: str, kernel: str, pool: ProcessPoolExecutor, request: pytest.FixtureRequest
) -> None:
    count = len(listed(architecture, kernel))
    assert count > 0, f"{kernel} is not listed for {architecture}"
    jobs = [(architecture, kernel, index) for index in range(count)]
    reports = remembered(
        request.config,
        f"{architecture}/{kernel}",
        lambda: [dataclasses.asdict(r) for r in pool.map(report, jobs)],
    )
    assert len(reports) == count
    assert [r for r in reports if r["stack_bytes"] > 0] == []
    assert [r for r in reports if r["shared_bytes"] > ARCHITECTURES[architecture].shared_bytes] == []


def test_a_tile_that_spills_is_noticed() -> None:
    """The report reads what the compiler says, not what we hope."""
    import torch
    from compile_reports import _cuda_stack_bytes

    from bimetal.engine.kernels.registry import Entry, Tile, compile_entry

    shapes = {"HEAD_DIM": 128, "BLOCK_TOKENS": 64, "IS_DECODE": 0}
    tile = Tile({"BLOCK_M": 128, "BLOCK_N": 64, "HAS_DESCRIPTORS": 0, "BLOCK_SEQUENCES": 1}, 4, 2)
    entry = Entry(SPECS["paged_attention"], torch.bfloat16, shapes, tile)
    assert _cuda_stack_bytes(compile_entry(entry, ARCHITECTURES["sm_90"])) > 0
