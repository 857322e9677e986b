"""`Fleet`: the nodes, GPUs and links that a user has, the model to run on them, and the limits to plan for.

Owns `fleet.yaml`. Does not know how layers are split (planner) or timed (perf).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from bimetal.catalog.document import Document
from bimetal.catalog.hardware import CPU, GpuSpec, cpu_spec, find_gpu, override
from bimetal.catalog.links import DEFAULT_LINK, LOOPBACK, SAME_HOST, LinkSpec, find_link
from bimetal.catalog.models import ModelSpec, load_model_spec
from bimetal.errors import ConfigError
from bimetal.units import DTYPE_BYTES

_STRICT = ConfigDict(extra="forbid")
Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Dtype = Literal["bfloat16", "float16", "float32", "float8", "float4"]
_ADDRESS = re.compile(r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})$")
MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Node:
    """GPUs of one kind on one host. A host with two kinds is two nodes."""

    __pydantic_config__ = _STRICT

    name: Name
    gpu: str
    """Catalogue name, or `cpu`."""
    num_gpus: Count = 1
    """Of `cpu`: the number of processes, each a device of its own."""
    tensor_parallel: Count = 1
    """GPUs that share each layer; `num_gpus` must be a multiple."""
    address: str | None = None
    """host:port of the node's first `bimetal stage --listen`, further stages on the ports after it; None: stages are
    child processes of the machine that serves."""
    python: str | None = None
    """Interpreter that holds this vendor's torch; None: the one that runs bimetal."""
    model_path: str | None = None
    """Where this node keeps the checkpoint, if not at the fleet's `model`."""
    num_threads: Count | None = None
    memory_bytes: Positive | None = None
    """Of one GPU, in place of the catalogue's; likewise the next two."""
    memory_bytes_per_s: Positive | None = None
    flops_per_s: Positive | None = None

    @property
    def num_stages(self) -> int:
        return self.num_gpus // self.tensor_parallel

    @property
    def device(self) -> GpuSpec:
        """The catalogue's GPU with what this node says better."""
        if self.gpu.lower() == CPU:
            return cpu_spec(self.memory_bytes, self.memory_bytes_per_s, self.flops_per_s)
        return override(
            find_gpu(self.gpu),
            memory_bytes=self.memory_bytes,
            memory_bytes_per_s=self.memory_bytes_per_s,
            flops_per_s=self.flops_per_s,
        )

    def stage_address(self, index: int) -> str | None:
        """host:port of the node's stage `index`."""
        if self.address is None:
            return None
        host, port = self.address.rsplit(":", 1)
        return f"{host}:{int(port) + index}"


@dataclass(frozen=True, slots=True)
class Link:
    """A connection between two nodes, by catalogue name (`100GbE`) or by its figures; figures win."""

    __pydantic_config__ = _STRICT

    between: tuple[Name, Name]
    kind: str | None = None
    bandwidth_bytes_per_s: Positive | None = None
    latency_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None

    def resolve(self, default: LinkSpec) -> LinkSpec:
        """What is not given comes from the named kind, or from `default`."""
        base = find_link(self.kind) if self.kind else default
        bandwidth = self.bandwidth_bytes_per_s or base.bandwidth_bytes_per_s
        latency = base.latency_s if self.latency_s is None else self.latency_s
        return LinkSpec(self.kind or "-".join(self.between), bandwidth, latency)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the plan must have room for, and the load for which it is best."""

    __pydantic_config__ = _STRICT

    max_model_len: Count = 4096
    max_num_seqs: Count = 64
    concurrency: Count | None = None
    """Sequences decoded together when throughput is predicted; None: max_num_seqs."""
    mean_context: Count | None = None
    """Tokens of a sequence on average, prompt and answer so far; None: half of max_model_len."""
    memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's memory for weights and KV cache; the rest is the runtime's and activations'."""

    @property
    def planned_concurrency(self) -> int:
        return self.concurrency or self.max_num_seqs

    @property
    def planned_context(self) -> int:
        return self.mean_context or max(1, self.max_model_len // 2)

    @property
    def kv_tokens(self) -> int:
        """Tokens that every stage's KV cache must hold: the planned batch, and at least one longest sequence."""
        return max(self.max_num_seqs * self.planned_context, self.max_model_len)


@dataclass(frozen=True, slots=True)
class Fleet:
    """One `fleet.yaml`."""

    __pydantic_config__ = _STRICT

    model: Annotated[str, Field(min_length=1)]
    """A catalogue name, or a path to a Hugging Face checkpoint."""
    nodes: tuple[Node, ...]
    links: tuple[Link, ...] = ()
    default_link: str = DEFAULT_LINK.name
    """Between hosts that no entry of `links` joins."""
    dtype: Dtype | None = None
    """Of the weights; None: as the checkpoint stores them."""
    limits: Limits = field(default_factory=Limits)
    version: Literal[1] = 1

    @property
    def model_spec(self) -> ModelSpec:
        return load_model_spec(self.model)

    @property
    def weight_dtype(self) -> str:
        """As given, or the checkpoint's own; 16 bits where that is none that can be planned for."""
        own = self.model_spec.weight_dtype
        return self.dtype or (own if own in DTYPE_BYTES else "bfloat16")

    def link_between(self, first: str, second: str) -> LinkSpec:
        """The link that joins two nodes; nodes without an address are on this machine."""
        nodes = {node.name: node for node in self.nodes}
        default = find_link(self.default_link)
        for link in self.links:
            if set(link.between) == {first, second}:
                return link.resolve(default)
        if _host(nodes[first]) == _host(nodes[second]):
            on_cpu = nodes[first].device.is_cpu and nodes[second].device.is_cpu
            return LOOPBACK if on_cpu else SAME_HOST
        return default


def _host(node: Node) -> str | None:
    return node.address.rsplit(":", 1)[0] if node.address else None


_ADAPTER = TypeAdapter(Fleet)


def load_fleet(path: Path) -> Fleet:
    """Read and check a fleet file; ConfigError names file, line, field, value and what is allowed."""
    return check_fleet(Document.read(Path(path)))


def parse_fleet(text: str, source: str) -> Fleet:
    """The same from text; `source` stands for the file's name in errors."""
    return check_fleet(Document(text, source))


def check_fleet(document: Document) -> Fleet:
    """From a parsed file."""
    if document.value is None:
        raise document.error((), "the file is empty: it needs at least `model` and `nodes`")
    fleet = document.validate(_ADAPTER)
    if not fleet.nodes:
        raise document.error(("nodes",), "is empty: name at least one node")
    for i, node in enumerate(fleet.nodes):
        _check_node(document, i, node)
    _check_names_and_ports(document, fleet)
    _check_links(document, fleet)
    try:
        spec = load_model_spec(fleet.model)
    except ConfigError as error:
        raise document.error(("model",), str(error)) from error
    limits = fleet.limits
    if limits.max_model_len > spec.max_position:
        raise document.error(
            ("limits", "max_model_len"),
            f"{limits.max_model_len} is more than the {spec.max_position} positions of {spec.name}: lower it",
        )
    if limits.mean_context and limits.mean_context > limits.max_model_len:
        raise document.error(
            ("limits", "mean_context"),
            f"{limits.mean_context} is more than max_model_len {limits.max_model_len}: lower it",
        )
    if limits.concurrency and limits.concurrency > limits.max_num_seqs:
        raise document.error(
            ("limits", "concurrency"),
            f"{limits.concurrency} is more than max_num_seqs {limits.max_num_seqs}: raise that or lower this",
        )
    return fleet


def _check_node(document: Document, i: int, node: Node) -> None:
    where = ("nodes", i)
    try:
        device = node.device
    except ConfigError as error:
        raise document.error((*where, "gpu"), str(error)) from error
    if node.num_gpus % node.tensor_parallel:
        raise document.error(
            (*where, "tensor_parallel"),
            f"{node.tensor_parallel} does not divide num_gpus {node.num_gpus}: use a divisor",
        )
    if device.is_cpu and node.tensor_parallel > 1:
        raise document.error(
            (*where, "tensor_parallel"),
            f"{node.tensor_parallel} on cpu: only GPUs share a layer; use 1, and num_gpus for more processes",
        )
    if node.address is not None:
        match = _ADDRESS.match(node.address)
        last_port = int(match[2]) + node.num_stages - 1 if match else 0
        if match is None or not 1 <= int(match[2]) <= last_port <= MAX_PORT:
            raise document.error(
                (*where, "address"),
                f"{node.address!r} is not host:port with room for {node.num_stages} port(s) up to {MAX_PORT}: "
                "write 10.0.0.1:29400 or [fe80::1]:29400",
            )


def _check_names_and_ports(document: Document, fleet: Fleet) -> None:
    names: dict[str, int] = {}
    ports: dict[str, str] = {}
    for i, node in enumerate(fleet.nodes):
        if node.name in names:
            raise document.error(
                ("nodes", i, "name"), f"{node.name!r} is also nodes[{names[node.name]}]: rename one"
            )
        names[node.name] = i
        for stage in range(node.num_stages):
            address = node.stage_address(stage)
            if address is None:
                continue
            if address in ports:
                raise document.error(
                    ("nodes", i, "address"),
                    f"{address} is already a stage of {ports[address]!r}: a node with n stages takes n ports in a row",
                )
            ports[address] = node.name


def _check_links(document: Document, fleet: Fleet) -> None:
    names = tuple(node.name for node in fleet.nodes)
    try:
        find_link(fleet.default_link)
    except ConfigError as error:
        raise document.error(("default_link",), str(error)) from error
    seen: dict[frozenset[str], int] = {}
    for i, link in enumerate(fleet.links):
        for end in link.between:
            if end not in names:
                raise document.error(
                    ("links", i, "between"), f"{end!r} is not a node: use two of {', '.join(names)}"
                )
        if link.between[0] == link.between[1]:
            raise document.error(("links", i, "between"), f"{link.between[0]!r} twice: name two nodes")
        if link.kind is not None:
            try:
                find_link(link.kind)
            except ConfigError as error:
                raise document.error(("links", i, "kind"), str(error)) from error
        pair = frozenset(link.between)
        if pair in seen:
            raise document.error(("links", i, "between"), f"is also links[{seen[pair]}]: keep one")
        seen[pair] = i
