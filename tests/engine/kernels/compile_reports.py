"""What the compilers say of a kernel compiled for a GPU that is not here: spills, scratch and shared memory."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from bimetal.engine.kernels.architecture import ARCHITECTURES
from bimetal.engine.kernels.registry import Entry, compile_entry, entries, read_rules
from bimetal.engine.kernels.specs import SPECS

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class CompileReport:
    entry: str
    stack_bytes: int
    """Per thread: spilled registers and arrays that did not fit in registers."""
    shared_bytes: int


def listed(architecture: str, kernel: str) -> list[Entry]:
    return [e for e in entries(SPECS, read_rules(ARCHITECTURES[architecture])) if e.spec.name == kernel]


def report(job: tuple[str, str, int]) -> CompileReport:
    """(architecture, kernel, index among its entries), since compiled programs do not travel between processes."""
    architecture, kernel, index = job
    entry = listed(architecture, kernel)[index]
    compiled = compile_entry(entry, ARCHITECTURES[architecture])
    stack_bytes = _cuda_stack_bytes(compiled) if "cubin" in compiled.asm else _hip_stack_bytes(compiled)
    return CompileReport(str(entry), stack_bytes, compiled.metadata.shared)


def _cuda_stack_bytes(compiled: Any) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = {name: int(value) for name, value in re.findall(r"(STACK|LOCAL):(\d+)", text)}
    return usage["STACK"] + usage["LOCAL"]


def _hip_stack_bytes(compiled: Any) -> int:
    text = compiled.asm["amdgcn"]
    scratch = re.search(r"\.private_segment_fixed_size:\s*(\d+)", text)
    spills = re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", text)
    assert scratch is not None and spills
    # Scalar registers may spill into vector registers, which costs no memory: only what reaches scratch counts.
    return int(scratch.group(1))
