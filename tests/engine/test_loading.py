"""A stage reads its own tensors only, and says what does not fit before anything runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.checkpoints import FAMILIES, edit_config, make_checkpoint
from tests.engine.serving import threaded_engine

from bimetal.catalog.models import load_model_spec
from bimetal.engine.stage.checkpoint import Checkpoint, DummyWeights, fingerprint
from bimetal.engine.stage.weights import StageWeights, load_stage_weights
from bimetal.errors import BimetalError, ConfigError, StageError


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_stage_reads_its_own_bytes_only(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(family, tmp_path)
    spec = load_model_spec(str(folder))
    whole = sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
    total = 0
    for start, end in ((0, 1), (1, 3), (3, 4)):
        checkpoint = Checkpoint(folder)
        seen: list[int] = []
        weights = load_stage_weights(
            spec,
            checkpoint,
            start,
            end,
            torch.device("cpu"),
            torch.float32,
            lambda done, _total, seen=seen: seen.append(done),
        )
        assert checkpoint.bytes_read == spec.stage_params(start, end) * 4 == weights.num_bytes
        assert seen == sorted(seen)
        assert seen[-1] == weights.num_bytes
        total += checkpoint.bytes_read
    # Tied embeddings are read by the first stage and by the last.
    assert total == whole + spec.tied_embeddings * spec.embedding_params * 4


def test_sharded_checkpoints_are_read_through_their_index(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    files = {f"model-{i}.safetensors": names[i::3] for i in range(3)}
    for file, part in files.items():
        save_file({n: tensors[n] for n in part}, folder / file)
    index = {"weight_map": {n: file for file, part in files.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    spec = load_model_spec(str(folder))
    checkpoint = Checkpoint(folder)
    load_stage_weights(spec, checkpoint, 0, 4, torch.device("cpu"), torch.float32, lambda *_: None)
    assert checkpoint.bytes_read == spec.num_params * 4


def test_another_models_config_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    edit_config(folder, intermediate_size=96)
    spec = load_model_spec(str(folder))
    with pytest.raises(
        StageError, match=r"mlp.gate_proj.weight is \(128, 96\), its config.json makes it \(96, 96\)"
    ):
        load_stage_weights(
            spec, Checkpoint(folder), 0, 4, torch.device("cpu"), torch.float32, lambda *_: None
        )
    edit_config(folder, intermediate_size=128, num_hidden_layers=5)
    spec = load_model_spec(str(folder))
    with pytest.raises(StageError, match=r"no tensor 'model\.layers\.4"):
        load_stage_weights(
            spec, Checkpoint(folder), 3, 5, torch.device("cpu"), torch.float32, lambda *_: None
        )


def test_fingerprints_tell_checkpoints_apart(tmp_path: Path) -> None:
    first = make_checkpoint("llama", tmp_path / "a")
    second = make_checkpoint("llama", tmp_path / "b")
    assert fingerprint(first) == fingerprint(second)
    edit_config(second, rms_norm_eps=1e-4)
    assert fingerprint(first)["config"] != fingerprint(second)["config"]
    assert fingerprint(first)["weights"] == fingerprint(second)["weights"]


def test_nodes_with_different_checkpoints_do_not_serve(tmp_path: Path) -> None:
    from tests.engine.serving import plan_document

    first = make_checkpoint("llama", tmp_path / "a")
    second = make_checkpoint("llama", tmp_path / "b")
    edit_config(second, rope_parameters={"rope_type": "default", "rope_theta": 5.0})
    document = plan_document(first, (0, 2, 4))
    document["replicas"][0]["stages"][1]["model_path"] = str(second)
    from bimetal.engine.driver.driver import Driver
    from bimetal.engine.wire.options import EngineOptions

    driver = Driver(EngineOptions(plan=document))
    try:
        with pytest.raises(
            StageError, match="stages 0 and 1 hold different checkpoints: their config hashes"
        ):
            driver.start()
    finally:
        driver.stop()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kv_cache_bytes": 1000}, r"room for 0 tokens of KV cache .*lower --max-model-len"),
        ({"max_model_len": 9999}, "max_model_len is 9999, but .* 512 positions"),
        ({"max_num_batched_tokens": 4}, "max_num_batched_tokens is 4, less than max_num_seqs 16"),
        ({"dtype": "float8"}, "dtype 'float8' is not supported"),
    ],
)
def test_options_that_cannot_work_say_so(tmp_path: Path, options: dict[str, object], says: str) -> None:
    folder = make_checkpoint("llama", tmp_path)
    with pytest.raises(BimetalError, match=says), threaded_engine(folder, (0, 4), **options):
        pass


def test_a_plan_for_another_model_says_so(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    with (
        pytest.raises(ConfigError, match="the stages end at layer 3, but the model has 4"),
        threaded_engine(folder, (0, 3)),
    ):
        pass


def test_dummy_weights_do_not_depend_on_the_split(tmp_path: Path) -> None:
    spec = load_model_spec(str(make_checkpoint("qwen3_moe", tmp_path)))
    cpu, dtype = torch.device("cpu"), torch.bfloat16

    def load(start: int, end: int) -> StageWeights:
        return load_stage_weights(spec, DummyWeights(cpu, dtype, 7), start, end, cpu, dtype, lambda *_: None)

    whole, part = load(0, 4), load(2, 4)
    assert torch.equal(whole.layers[2].qkv.weight, part.layers[0].qkv.weight)
    assert not torch.equal(whole.layers[2].qkv.weight, whole.layers[3].qkv.weight)
