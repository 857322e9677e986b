"""`diagnose`: what would go wrong before anything loads. Asks each node what it is and compares the answers.

A node on this machine is asked through its own interpreter, a remote one through its `bimetal stage --listen`. Torch-free.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bimetal
from bimetal.catalog.hardware import CPU
from bimetal.catalog.models import ModelSpec, load_model_spec
from bimetal.engine.driver.stages import device_of
from bimetal.engine.link.tcp import connect
from bimetal.engine.wire.frame import WIRE_VERSION, Kind, pack_json, unpack_json
from bimetal.engine.wire.handshake import SECRET_VARIABLE
from bimetal.errors import BimetalError, ConfigError
from bimetal.plan import Plan, Stage
from bimetal.units import format_bytes

_PROBE_TIMEOUT_S = 120.0
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
HERE_REMEDY = "copy the checkpoint's config and tokenizer to this machine and name their folder with --model"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked. `remedy` is empty where it is fine."""

    where: str
    what: str
    is_ok: bool
    detail: str
    remedy: str = ""


def diagnose(plan: Plan) -> list[Finding]:
    """Every stage of every replica, then the checkpoints against each other."""
    findings: list[Finding] = []
    fingerprints: list[tuple[str, dict[str, str]]] = []
    spec = load_model_spec(plan.model)
    for replica in plan.replicas:
        for i, stage in enumerate(replica.stages):
            where = f"{replica.name} stage {i} ({stage.node})"
            try:
                answer = _probe(plan, stage)
            except BimetalError as error:
                findings.append(Finding(where, "reach", False, str(error)))
                continue
            findings += _check_node(where, plan, spec, stage, answer)
            if answer.get("fingerprint"):
                fingerprints.append((where, answer["fingerprint"]))
                findings.append(_check_model(where, plan, spec, answer.get("dimensions")))
            else:
                folder = stage.model_path or plan.model
                remedy = "copy the checkpoint there, or set the node's model_path"
                findings.append(Finding(where, "checkpoint", False, f"no folder {folder!r}", remedy))
    return [_check_here(plan), *findings, *_check_checkpoints(fingerprints)]


def _check_here(plan: Plan) -> Finding:
    """The machine that serves reads config and tokenizer, whoever holds the weights."""
    folder = Path(plan.model).expanduser()
    if not folder.is_dir():
        return Finding("here", "model", False, f"no folder {plan.model!r}", HERE_REMEDY)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return Finding("here", "model", False, f"no tokenizer in {folder}", HERE_REMEDY)
    return Finding("here", "model", True, f"config and tokenizer in {folder}")


def _check_model(where: str, plan: Plan, spec: ModelSpec, dimensions: dict[str, int] | None) -> Finding:
    """Whether a node's checkpoint is of the model that was planned."""
    if dimensions is None:
        return Finding(
            where, "model", False, "its config.json cannot be read", "copy the checkpoint there again"
        )
    wrong = [f"{k} {dimensions.get(k)} and {n}" for k, n in spec.dimensions.items() if dimensions.get(k) != n]
    if not wrong:
        return Finding(where, "model", True, f"of the dimensions of {spec.name}")
    remedy = "point the node's model_path at the planned model"
    return Finding(where, "model", False, f"not the plan's {plan.model}: {', '.join(wrong)}", remedy)


def _probe(plan: Plan, stage: Stage) -> dict[str, Any]:
    request = json.dumps({"devices": [device_of(stage)], "model": stage.model_path or plan.model})
    if stage.address is None:
        return _probe_interpreter(stage, request)
    secret = os.environ.get(SECRET_VARIABLE)
    if not secret:
        raise ConfigError(f"stages on other hosts need a shared secret: set {SECRET_VARIABLE} here and there")
    connection = connect(stage.address, secret, "probe", timeout_s=5.0)
    try:
        connection.set_timeout(_PROBE_TIMEOUT_S)
        connection.send_frame(pack_json(Kind.PROBE, json.loads(request)))
        header, payload = connection.receive()
        if header.kind is not Kind.PROBE:
            raise ConfigError(f"the stage at {stage.address} answered a probe with {header.kind.name}")
        answer: dict[str, Any] = unpack_json(payload)
        return answer
    finally:
        connection.close()


def _probe_interpreter(stage: Stage, request: str) -> dict[str, Any]:
    python = stage.python or sys.executable
    root = str(Path(bimetal.__file__ or "").parent.parent)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
    }
    try:
        done = subprocess.run(
            [python, "-m", "bimetal.engine.stage.probe", request],
            capture_output=True,
            env=environment,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"interpreter {python!r} does not run: {error}") from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise ConfigError(f"interpreter {python!r} cannot run a stage: {lines[-1]}")
    # The last line: what an interpreter's own start prints comes before.
    last = (done.stdout.strip().splitlines() or [b""])[-1]
    try:
        answer: dict[str, Any] = json.loads(last)
    except ValueError:
        raise ConfigError(
            f"interpreter {python!r} answered {last[:80].decode(errors='replace')!r} where its description was due"
        ) from None
    return answer


def _check_node(
    where: str, plan: Plan, spec: ModelSpec, stage: Stage, answer: dict[str, Any]
) -> list[Finding]:
    build = (
        f"cuda {answer['cuda']}"
        if answer.get("cuda")
        else f"rocm {answer['hip']}"
        if answer.get("hip")
        else "cpu only"
    )
    findings = [
        Finding(where, "interpreter", True, f"python {answer['python']}, torch {answer['torch']} ({build})"),
        Finding(
            where,
            "wire version",
            answer["wire_version"] == WIRE_VERSION,
            str(answer["wire_version"]),
            ""
            if answer["wire_version"] == WIRE_VERSION
            else f"install the bimetal that speaks version {WIRE_VERSION}",
        ),
    ]
    device = answer["devices"][0]
    if "error" in device:
        return [
            *findings,
            Finding(where, "device", False, device["error"], "install this vendor's torch for the node"),
        ]
    driver = f", driver {device['driver']}" if device.get("driver") else ""
    findings.append(Finding(where, "device", True, f"{device['name']} ({device['vendor']}){driver}"))
    findings.append(
        Finding(where, "kernels", True, device["kernels"])
        if device.get("kernels")
        else Finding(where, "kernels", False, "none for this architecture", "use a listed GPU, or cpu")
    )
    need = spec.stage_params(stage.start_layer, stage.end_layer) * _weight_bytes(plan, stage)
    kv_dtype = "float32" if plan.dtype == "float32" else "bfloat16"
    kv = plan.max_model_len * spec.kv_bytes_per_token(kv_dtype, stage.num_layers)
    enough = device["free_bytes"] >= need + kv
    detail = f"{format_bytes(device['free_bytes'])} free, {format_bytes(need + kv)} needed for weights and one sequence"
    findings.append(
        Finding(where, "memory", enough, detail, "" if enough else "free the device, or give it fewer layers")
    )
    return findings


def _weight_bytes(plan: Plan, stage: Stage) -> int:
    """Of one weight; CPU stages widen what is stored in 8 bits."""
    if plan.dtype == "float8" and stage.gpu != CPU:
        return 1
    return 4 if plan.dtype == "float32" else 2


def _check_checkpoints(fingerprints: Sequence[tuple[str, dict[str, str]]]) -> list[Finding]:
    if not fingerprints:
        return []
    first_where, first = fingerprints[0]
    findings = []
    for key, value in first.items():
        different = [where for where, found in fingerprints if found.get(key) != value]
        findings.append(
            Finding(
                "all nodes",
                f"same {key}",
                not different,
                value if not different else f"{', '.join(different)} differ from {first_where}",
                "" if not different else "copy the same revision to every node",
            )
        )
    return findings
