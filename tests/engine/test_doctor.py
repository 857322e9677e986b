"""`diagnose` on fleets in which something is wrong."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.engine.checkpoints import edit_config, make_checkpoint
from tests.engine.serving import plan_document

from bimetal.engine.doctor import diagnose
from bimetal.plan import Plan, parse_plan

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _with_tokenizer(make_checkpoint("llama", tmp_path_factory.mktemp("llama")))


def _with_tokenizer(folder: Path) -> Path:
    (folder / "tokenizer.json").write_text("{}")
    return folder


def with_second_path(folder: Path, path: Path) -> Plan:
    plan = parse_plan(plan_document(folder, (0, 2, 4)), "plan")
    replica = plan.replicas[0]
    first, second = replica.stages
    stages = (first, replace(second, model_path=str(path)))
    return replace(plan, replicas=(replace(replica, stages=stages),))


def test_a_node_without_the_checkpoint_is_named(folder: Path, tmp_path: Path) -> None:
    found = [f for f in diagnose(with_second_path(folder, tmp_path / "none")) if not f.is_ok]
    assert [(f.where, f.what) for f in found] == [("replica stage 1 (node1)", "checkpoint")]
    assert str(tmp_path / "none") in found[0].detail


def test_nodes_with_different_checkpoints_are_named(folder: Path, tmp_path: Path) -> None:
    other = _with_tokenizer(make_checkpoint("llama", tmp_path / "other"))
    edit_config(other, rms_norm_eps=1e-3)
    found = [f for f in diagnose(with_second_path(folder, other)) if not f.is_ok]
    assert [f.what for f in found] == ["same config"]
    assert "stage 1 (node1)" in found[0].detail


def test_what_this_machine_lacks_is_named(folder: Path) -> None:
    """Weights may be elsewhere, but who serves reads config and tokenizer."""
    plan = replace(with_second_path(folder, folder), model="Llama-3.1-8B")
    found = {(f.where, f.what): f for f in diagnose(plan)}
    assert "no folder 'Llama-3.1-8B'" in found["here", "model"].detail
    assert "--model" in found["here", "model"].remedy
    of_node = found["replica stage 1 (node1)", "model"]
    assert not of_node.is_ok
    assert "hidden_size" in of_node.detail


def test_an_interpreter_that_says_more_is_understood(folder: Path, tmp_path: Path) -> None:
    """Some print a greeting, or what their torch found, before anything else."""
    loud, mute = tmp_path / "loud", tmp_path / "mute"
    loud.write_text(f'#!/bin/sh\necho hello\nexec {sys.executable} "$@"\n')
    mute.write_text("#!/bin/sh\necho hello\n")
    for python in (loud, mute):
        python.chmod(0o755)
    plan = parse_plan(plan_document(folder, (0, 2, 4)), "plan")
    replica = plan.replicas[0]
    stages = tuple(
        replace(stage, python=str(python)) for stage, python in zip(replica.stages, (loud, mute), strict=True)
    )
    found = diagnose(replace(plan, replicas=(replace(replica, stages=stages),)))
    bad = [f for f in found if not f.is_ok]
    assert [(f.where, f.what) for f in bad] == [("replica stage 1 (node1)", "reach")]
    assert "answered 'hello'" in bad[0].detail
