"""Only listed programs are launched, and only on what they were compiled for."""

import pytest
import torch

from bimetal.engine.kernels.architecture import ARCHITECTURES, architecture_named
from bimetal.engine.kernels.registry import (
    Entry,
    Launcher,
    Program,
    Rule,
    Tile,
    compile_entry,
    entries,
    read_rules,
)
from bimetal.engine.kernels.specs import SPECS
from bimetal.errors import ConfigError, EngineError

TILE = Tile({"BLOCK": 2048}, 4, 1)


def launched(*arguments: object) -> list[object]:
    """What reaches the device of a call of silu_and_mul."""
    seen: list[object] = []
    program = Program(
        Entry(SPECS["silu_and_mul"], torch.bfloat16, {}, TILE),
        lambda grid, values: seen.extend(values),
        False,
    )
    program((1, 1, 1), *arguments)
    return seen


def test_what_was_compiled_for_is_launched() -> None:
    out, gate_up = torch.empty(32, dtype=torch.bfloat16), torch.empty(64, dtype=torch.bfloat16)
    assert launched(out, gate_up, 32) == [out.data_ptr(), gate_up.data_ptr(), 32]


@pytest.mark.parametrize(
    ("out", "columns", "said"),
    [
        (torch.empty(32), 32, r"torch\.float32"),
        (torch.empty(33, dtype=torch.bfloat16)[1:], 32, "multiple of 16 bytes"),
        (torch.empty(32, dtype=torch.bfloat16), 31, "not 31"),
    ],
)
def test_other_dtypes_and_alignments_are_refused(out: torch.Tensor, columns: int, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        launched(out, torch.empty(64, dtype=torch.bfloat16), columns)


def test_an_unlisted_shape_is_refused_with_what_is_listed() -> None:
    launcher = Launcher(SPECS, ARCHITECTURES["sm_90"])
    with pytest.raises(ConfigError, match=r"HEAD_DIM.*96.*64, 128, 256"):
        launcher.program("rotary_and_cache", torch.bfloat16, HEAD_DIM=96, BLOCK_TOKENS=64, HAS_NORM=0)


def test_a_size_gets_the_smallest_bucket_that_holds_it() -> None:
    rules = [
        Rule("silu_and_mul", (torch.float32,), {}, limit, Tile({"BLOCK": block}, 4, 1))
        for limit, block in ((None, 4096), (8, 512), (64, 1024))
    ]
    launcher = Launcher(SPECS, ARCHITECTURES["sm_90"], rules)
    blocks = [
        launcher.program("silu_and_mul", torch.float32, size).tile["BLOCK"]
        for size in (0, 8, 9, 64, 65, 10**6)
    ]
    assert blocks == [512, 512, 1024, 1024, 4096, 4096]
    with pytest.raises(ConfigError, match="up to 64"):
        Launcher(SPECS, ARCHITECTURES["sm_90"], rules[1:]).program("silu_and_mul", torch.float32, 65)


def test_constants_are_those_of_the_program() -> None:
    with pytest.raises(EngineError, match="BLOCK"):
        compile_entry(Entry(SPECS["silu_and_mul"], torch.float32, {}, Tile({}, 4, 1)), ARCHITECTURES["sm_90"])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_two_rules_claim_the_same_bucket(name: str) -> None:
    """Which of them won would be chance."""
    claims = [
        (rule.kernel, dtype, rule.up_to, *entry.shapes.items())
        for rule in read_rules(ARCHITECTURES[name])
        for entry in entries(SPECS, [rule])
        for dtype in [entry.dtype]
    ]
    assert len(claims) == len(set(claims))


def test_an_architecture_is_named_as_its_driver_names_it() -> None:
    assert architecture_named("gfx942:sramecc+:xnack-").threads_per_wave == 64
    with pytest.raises(ConfigError, match=r"sm_75.*sm_90, gfx942, gfx950"):
        architecture_named("sm_75")
