"""Which programs may be launched: every signature and tile configuration, per architecture.

A `KernelSpec` is a Triton program with its arguments' types. `data/<architecture>.json` lists, by rules, the dtypes,
shape constants and tiles it is compiled for; together they are the architecture's entries. `entries` enumerates them
for the ahead-of-time test, and `Launcher` launches them and nothing else: what is not listed, or was listed for other
dtypes or alignments than a call brings, is an error. It knows nothing of what the programs compute.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bimetal.engine.kernels.architecture import Architecture
from bimetal.errors import ConfigError, EngineError

Grid = tuple[int, int, int]

_TRITON_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32"}
_TORCH_DTYPES = {name: dtype for dtype, name in _TRITON_DTYPES.items()}
_FP8_DTYPES = {"e4m3fn": "fp8e4nv", "e4m3fnuz": "fp8e4b8"}
_FP8_POINTER = "*fp8"
_ALIGNMENT_BYTES = 16
_DIVISOR = 16
_UNLIMITED = 2**62


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """A program and the types of its arguments, in order: "*T" (pointer to the entry's dtype), "*fp8" (to the
    architecture's FP8), "*fp32", "*i32", "i32", "fp32", "tensordesc<T[ROWS, COLUMNS]>" (a tile's descriptor, sized by constants; an unused pointer in a tile without).
    `aligned` names the pointers at multiples of 16 bytes and the integers that are multiples of 16.
    What the program takes beyond `arguments` are constants: first shapes, then the tile's."""

    name: str
    function: Any
    arguments: Mapping[str, str]
    aligned: frozenset[str]

    @property
    def constant_names(self) -> tuple[str, ...]:
        return tuple(name for name in self.function.arg_names if name not in self.arguments)


@dataclass(frozen=True, slots=True)
class Tile:
    constants: Mapping[str, int]
    num_warps: int
    num_stages: int
    options: Mapping[str, int] = field(default_factory=dict)
    """The compiler's further options (AMD's waves_per_eu, NVIDIA's maxnreg)."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One tile and what it is for: every dtype, every combination of shape constants, sizes up to `up_to`.

    What "size" means is the kernel's matter (rows per expert, tokens per sequence); None: any.
    """

    kernel: str
    dtypes: tuple[torch.dtype, ...]
    shapes: Mapping[str, tuple[int, ...]]
    up_to: int | None
    tile: Tile
    source: str = ""
    """The measurement that chose the tile, or that there is none."""

    def matches(self, kernel: str, dtype: torch.dtype, shapes: Mapping[str, int]) -> bool:
        return (
            self.kernel == kernel
            and dtype in self.dtypes
            and self.shapes.keys() == shapes.keys()
            and all(shapes[name] in values for name, values in self.shapes.items())
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """One program as it is compiled."""

    spec: KernelSpec
    dtype: torch.dtype
    shapes: Mapping[str, int]
    tile: Tile

    @property
    def constants(self) -> dict[str, int]:
        return {**self.shapes, **self.tile.constants}

    def __str__(self) -> str:
        constants = ",".join(f"{name}={value}" for name, value in self.constants.items())
        dtype = _TRITON_DTYPES[self.dtype]
        return (
            f"{self.spec.name}[{dtype},{constants},warps={self.tile.num_warps},stages={self.tile.num_stages}]"
        )


def read_rules(architecture: Architecture) -> list[Rule]:
    text = (resources.files(__package__) / "data" / f"{architecture.name}.json").read_text()
    document = json.loads(text)
    return [_rule(fields, document["source"]) for fields in document["rules"]]


def _rule(fields: Mapping[str, Any], source: str) -> Rule:
    return Rule(
        kernel=fields["kernel"],
        dtypes=tuple(_TORCH_DTYPES[name] for name in fields["dtypes"]),
        shapes={name: tuple(values) for name, values in fields.get("shapes", {}).items()},
        up_to=fields.get("up_to"),
        tile=Tile(fields["tile"], fields["num_warps"], fields["num_stages"], fields.get("options", {})),
        source=fields.get("source", source),
    )


def entries(specs: Mapping[str, KernelSpec], rules: Iterable[Rule]) -> Iterator[Entry]:
    """Each distinct program that the rules list."""
    seen = set()
    for rule in rules:
        for values in itertools.product(*rule.shapes.values()):
            for dtype in rule.dtypes:
                entry = Entry(
                    specs[rule.kernel], dtype, dict(zip(rule.shapes, values, strict=True)), rule.tile
                )
                if str(entry) not in seen:
                    seen.add(str(entry))
                    yield entry


def compile_entry(entry: Entry, architecture: Architecture) -> Any:
    """Triton's compiled kernel; needs no GPU."""
    spec = entry.spec
    constants = entry.constants
    missing = set(spec.constant_names) ^ set(constants)
    if missing:
        raise EngineError(
            f"{entry} on {architecture.name}: constants {sorted(missing)} are listed or taken, not both"
        )
    names = spec.function.arg_names
    dtype = _TRITON_DTYPES[entry.dtype]
    signature = {
        name: _triton_type(spec.arguments.get(name, "constexpr"), dtype, constants, architecture)
        for name in names
    }
    source = ASTSource(
        fn=spec.function,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", _DIVISOR]] for name in sorted(spec.aligned)},
    )
    options = {"num_warps": entry.tile.num_warps, "num_stages": entry.tile.num_stages, **entry.tile.options}
    target = GPUTarget(architecture.backend, architecture.triton_arch, architecture.threads_per_wave)
    return triton.compile(source, target=target, options=options)


def _triton_type(kind: str, dtype: str, constants: Mapping[str, int], architecture: Architecture) -> str:
    if kind == _FP8_POINTER:
        return f"*{_FP8_DTYPES[architecture.fp8_e4m3]}"
    if kind.startswith("tensordesc"):
        if not constants["HAS_DESCRIPTORS"]:
            return f"*{dtype}"
        for name, value in constants.items():
            kind = kind.replace(name, str(value))
    return kind.replace("T", dtype)


class Program:
    """An entry that can be launched."""

    def __init__(
        self,
        entry: Entry,
        run: Callable[..., None],
        is_interpreted: bool,
        fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    ) -> None:
        self.tile = entry.tile.constants
        self._entry = entry
        self._run = run
        self._is_interpreted = is_interpreted
        dtypes = {**_TORCH_DTYPES, _FP8_POINTER[1:]: fp8_dtype}
        self._checks = tuple(
            (
                name,
                dtypes.get(kind[1:], entry.dtype) if kind.startswith("*") else None,
                name in entry.spec.aligned,
            )
            for name, kind in entry.spec.arguments.items()
        )

    def __call__(self, grid: Grid, *arguments: Any) -> None:
        """Launch on the current stream. Tensors are passed as they lie in memory; None stands for one not touched."""
        values: list[Any] = []
        for argument, (name, dtype, is_aligned) in zip(arguments, self._checks, strict=True):
            if argument is None:
                values.append(0)
            elif dtype is None:
                if is_aligned and argument % _DIVISOR:
                    raise self._refused(name, f"{argument}", f"a multiple of {_DIVISOR}")
                values.append(argument)
            else:
                if argument.dtype is not dtype:
                    raise self._refused(name, f"{argument.dtype}", f"{dtype}")
                address = argument.data_ptr()
                if is_aligned and address % _ALIGNMENT_BYTES:
                    raise self._refused(
                        name, f"address {address:#x}", f"a multiple of {_ALIGNMENT_BYTES} bytes"
                    )
                values.append(address)
        if 0 not in grid:
            self._run(grid, arguments if self._is_interpreted else values)

    def _refused(self, name: str, given: str, wanted: str) -> EngineError:
        return EngineError(
            f"kernel {self._entry} was compiled for {name} as {wanted}, not {given}: pass it so, or list the kernel "
            "for what is needed in engine/kernels/specs.py"
        )


class Launcher:
    """Finds, compiles once and launches an architecture's listed programs on the current device."""

    def __init__(
        self, specs: Mapping[str, KernelSpec], architecture: Architecture, rules: Sequence[Rule] | None = None
    ) -> None:
        """`rules` other than the listed ones serve measurements of what to list."""
        self.architecture = architecture
        self._specs = specs
        self._rules = read_rules(architecture) if rules is None else rules
        self._is_interpreted = bool(triton.knobs.runtime.interpret)
        fp8 = architecture.fp8_e4m3
        self._fp8_dtype = torch.float8_e4m3fn if fp8 == "e4m3fn" else torch.float8_e4m3fnuz
        self._programs: dict[tuple[Any, ...], list[tuple[int, Program]]] = {}

    def program(self, kernel: str, dtype: torch.dtype, size: int = 0, **shapes: int) -> Program:
        """The listed program for the smallest bucket that `size` fits in."""
        key = (kernel, dtype, *shapes.values())
        buckets = self._programs.get(key)
        if buckets is None:
            buckets = self._programs[key] = self._load(kernel, dtype, shapes)
        for up_to, program in buckets:
            if size <= up_to:
                return program
        raise ConfigError(
            f"kernel {kernel} is listed for sizes up to {buckets[-1][0]} on {self.architecture.name}, not {size}: add a "
            f"rule to engine/kernels/data/{self.architecture.name}.json"
        )

    def _load(self, kernel: str, dtype: torch.dtype, shapes: Mapping[str, int]) -> list[tuple[int, Program]]:
        rules = [rule for rule in self._rules if rule.matches(kernel, dtype, shapes)]
        if not rules:
            known = [
                (name, v) for rule in self._rules if rule.kernel == kernel for name, v in rule.shapes.items()
            ]
            values = {
                name: sorted({v for other, vs in known if other == name for v in vs}) for name, _ in known
            }
            offered = [f"{name} {numbers}" for name, numbers in values.items()]
            raise ConfigError(
                f"kernel {kernel} with {dtype}, {dict(shapes)} is not listed for {self.architecture.name} (listed: "
                f"{'; '.join(offered) or 'no shapes'}): use the torch kernels, or add a rule to "
                f"engine/kernels/data/{self.architecture.name}.json and run the ahead-of-time test"
            )
        rules.sort(key=lambda rule: _UNLIMITED if rule.up_to is None else rule.up_to)
        return [
            (_UNLIMITED if rule.up_to is None else rule.up_to, self._program(rule, dtype, shapes))
            for rule in rules
        ]

    def _program(self, rule: Rule, dtype: torch.dtype, shapes: Mapping[str, int]) -> Program:
        entry = Entry(self._specs[rule.kernel], dtype, shapes, rule.tile)
        function = entry.spec.function
        if self._is_interpreted:

            def interpret(grid: Grid, arguments: tuple[Any, ...]) -> None:
                function[grid](*arguments, **entry.constants)

            return Program(entry, interpret, True, self._fp8_dtype)
        compiled = compile_entry(entry, self.architecture)
        constants = [entry.constants[name] for name in entry.spec.constant_names]

        def launch(grid: Grid, values: list[Any]) -> None:
            # Its first use loads the program, which sets its function. This is compiled[grid](...), less the
            # look-ups of hooks that nobody set: they cost more than the launch.
            stream = torch.cuda.current_stream().cuda_stream
            compiled.run(
                *grid,
                stream,
                compiled.function,
                compiled.packed_metadata,
                None,
                None,
                None,
                *values,
                *constants,
            )

        return Program(entry, launch, False, self._fp8_dtype)
