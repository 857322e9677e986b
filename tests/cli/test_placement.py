"""Where a plan comes from, and what is refused before anything loads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.engine.checkpoints import make_checkpoint
from tests.engine.serving import plan_document

from bimetal.cli.agree import plan_of_stages
from bimetal.cli.main import bimetal
from bimetal.cli.placement import with_model
from bimetal.errors import ConfigError
from bimetal.plan import dump_plan, parse_plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def test_a_planned_model_is_served_from_a_folder_of_this_machine(folder: Path, tmp_path: Path) -> None:
    plan = parse_plan(plan_document("Llama-3.1-8B", (0, 16, 32)), "plan")
    assert with_model(plan, None) is plan
    with pytest.raises(ConfigError, match=r"another model than the plan's Llama-3.1-8B: num_layers 4 and 32"):
        with_model(plan, str(folder))
    small = parse_plan(plan_document(folder, (0, 2, 4)), "plan")
    moved = tmp_path / "moved"
    folder_copy = make_checkpoint("llama", moved)
    assert with_model(small, str(folder_copy)).model == str(folder_copy)


def test_a_stage_of_several_gpus_is_refused_before_its_folder_is_looked_for(tmp_path: Path) -> None:
    plan = parse_plan(plan_document("Llama-3.1-8B", (0, 32)), "plan")
    pair = replace(plan.replicas[0].stages[0], device_indices=(0, 1))
    path = tmp_path / "plan.yaml"
    path.write_text(dump_plan(replace(plan, replicas=(replace(plan.replicas[0], stages=(pair,)),))))
    result = CliRunner().invoke(bimetal, ["serve", str(path)])
    assert isinstance(result.exception, ConfigError)
    assert "tensor_parallel 2" in str(result.exception)


@pytest.mark.parametrize("device", ["H1000", "gpu", "cpu30"])
def test_an_unknown_gpu_is_named_before_anything_starts(folder: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=f"GPU '{device}' is not in the catalogue"):
        plan_of_stages(str(folder), f"{device}:4", None)
    result = CliRunner().invoke(bimetal, ["bench", "--model", str(folder), "--device", device])
    assert f"GPU '{device}' is not in the catalogue" in str(result.exception)


def test_layers_that_do_not_add_up_are_named_as_they_were_given(folder: Path) -> None:
    with pytest.raises(ConfigError, match="the layers of cpu:3,cpu:2 is '3,2'"):
        plan_of_stages(str(folder), "cpu:3,cpu:2", None)
