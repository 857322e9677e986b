"""What a fleet file may say, and that every fault in it is answered with file, line, field, value and remedy."""

from pathlib import Path

import pytest

from bimetal.catalog.fleet import load_fleet, parse_fleet
from bimetal.catalog.links import LOOPBACK, SAME_HOST
from bimetal.errors import ConfigError

GOOD = """\
model: Llama-3.1-8B
nodes:
  - name: left
    gpu: H100
    num_gpus: 4
    tensor_parallel: 2
    address: 10.0.0.1:29400
  - name: right
    gpu: MI300X
    address: 10.0.0.2:29400
    memory_bytes: 150e9
links:
  - between: [right, left]
    kind: 100GbE
    latency_s: 5e-6
limits:
  max_model_len: 8192
  max_num_seqs: 32
"""


def test_a_good_file():
    fleet = parse_fleet(GOOD, "f.yaml")
    left, right = fleet.nodes
    assert left.num_stages == 2
    assert [left.stage_address(i) for i in range(2)] == ["10.0.0.1:29400", "10.0.0.1:29401"]
    assert right.device.memory_bytes == 150e9
    link = fleet.link_between("left", "right")
    assert link.latency_s == 5e-6
    assert link.bandwidth_bytes_per_s == pytest.approx(11.77e9, rel=1e-3)
    assert fleet.limits.planned_context == 4096
    assert fleet.limits.kv_tokens == 32 * 4096
    assert fleet.model_spec.num_layers == 32


def test_examples_load():
    folder = Path(__file__).parents[2] / "examples"
    assert load_fleet(folder / "fleet.yaml").model_spec.num_layers == 80
    cpu = folder / "fleet-cpu.yaml"
    text = cpu.read_text().replace(".demo/SmolLM2-135M-Instruct", "Llama-3.1-8B")
    assert parse_fleet(text, str(cpu)).nodes[0].device.is_cpu


def test_links_default_by_host():
    text = GOOD.replace("links:\n  - between: [right, left]\n    kind: 100GbE\n    latency_s: 5e-6\n", "")
    fleet = parse_fleet(text, "f")
    assert fleet.link_between("left", "right").name == "25GbE"
    assert fleet.link_between("left", "left") is SAME_HOST
    assert parse_fleet(text + "default_link: 10GbE\n", "f").link_between("left", "right").name == "10GbE"
    local = "model: Llama-3.1-8B\nnodes: [{name: a, gpu: cpu}, {name: b, gpu: cpu}]\n"
    assert parse_fleet(local, "f").link_between("a", "b") is LOOPBACK


@pytest.mark.parametrize(
    ("old", "new", "line", "field", "message"),
    [
        ("H100", "H101", 4, r"nodes\[0\].gpu", "'H101' is not in the catalogue: did you mean H100"),
        ("num_gpus: 4", "num_gpus: 0", 5, r"nodes\[0\].num_gpus", r"greater than or equal to 1 \(got 0\)"),
        ("num_gpus: 4", "num_gpus: many", 5, r"nodes\[0\].num_gpus", r"valid integer.*\(got 'many'\)"),
        ("num_gpus: 4", "num_gpus: true", 5, r"nodes\[0\].num_gpus", r"a number.*got the boolean true"),
        ("memory_bytes: 150e9", "memory_bytes: yes", 11, r"memory_bytes", "a number.*got the boolean true"),
        ("latency_s: 5e-6", "latency_s: false", 15, r"links\[0\].latency_s", "got the boolean false"),
        ("max_num_seqs: 32", "concurrency: true", 18, "limits.concurrency", "got the boolean true"),
        ("model: Llama-3.1-8B", "model: Llama-3.1-8B\nversion: true", 2, "version", "got the boolean true"),
        ("num_gpus: 4", "num_gpu: 4", 5, r"nodes\[0\].num_gpu", "is not a field here"),
        ("tensor_parallel: 2", "tensor_parallel: 3", 6, "tensor_parallel", "3 does not divide num_gpus 4"),
        ("10.0.0.1:29400", "10.0.0.1", 7, r"nodes\[0\].address", "'10.0.0.1' is not host:port"),
        ("10.0.0.1:29400", "h:65535", 7, r"nodes\[0\].address", "room for 2"),
        ("10.0.0.2:29400", "10.0.0.1:29401", 10, r"nodes\[1\].address", "already a stage of 'left'"),
        ("name: right", "name: left", 8, r"nodes\[1\].name", r"'left' is also nodes\[0\]"),
        ("name: right", "name: a b", 8, r"nodes\[1\].name", "pattern"),
        ("memory_bytes: 150e9", "memory_bytes: -1", 11, r"memory_bytes", r"greater than 0 \(got -1\)"),
        ("memory_bytes: 150e9", "memory_bytes: .nan", 11, r"memory_bytes", "finite|greater"),
        ("[right, left]", "[right, middle]", 13, r"links\[0\].between", "'middle' is not a node"),
        ("[right, left]", "[left, left]", 13, r"links\[0\].between", "name two nodes"),
        ("[right, left]", "[left]", 13, r"links\[0\].between", "required|missing"),
        ("kind: 100GbE", "kind: 100Gb", 14, r"links\[0\].kind", "did you mean 100GbE"),
        ("latency_s: 5e-6", "latency_s: -1", 15, r"links\[0\].latency_s", "greater than or equal to 0"),
        ("max_model_len: 8192", "max_model_len: 999999", 17, "limits.max_model_len", "131072 positions"),
        ("max_num_seqs: 32", "concurrency: 65", 18, "limits.concurrency", "more than max_num_seqs 64"),
        ("max_num_seqs: 32", "mean_context: 9000", 18, "limits.mean_context", "more than max_model_len 8192"),
        (
            "max_num_seqs: 32",
            "memory_utilization: 1.5",
            18,
            "limits.memory_utilization",
            "less than or equal to 1",
        ),
        ("Llama-3.1-8B", "Llama-4", 1, "model", "neither a folder"),
        ("model: Llama-3.1-8B", "version: 2", 1, "version", "Input should be 1"),
        ("limits:", "dtype: int3\nlimits:", 16, "dtype", "'bfloat16', 'float16'"),
        ("limits:", "default_link: wifi\nlimits:", 16, "default_link", "not in the catalogue"),
        ("name: right", "name: right\n    name: again", 9, "name", "given twice"),
        (
            "gpu: MI300X",
            "gpu: cpu\n    num_gpus: 2\n    tensor_parallel: 2",
            11,
            "tensor_parallel",
            "only GPUs share",
        ),
    ],
)
def test_faults(old, new, line, field, message):
    assert old in GOOD
    with pytest.raises(ConfigError, match=rf"(?s)f\.yaml:{line}: .*{field}.*({message})"):
        parse_fleet(GOOD.replace(old, new, 1), "f.yaml")


def test_missing_fields_point_at_their_parent():
    with pytest.raises(ConfigError, match=r"f:2: nodes\[0\]\.gpu: is missing"):
        parse_fleet("model: Llama-3.1-8B\nnodes: [{name: a}]", "f")
    with pytest.raises(ConfigError, match="nodes: is missing"):
        parse_fleet("model: Llama-3.1-8B\n", "f")


def test_files_that_are_no_fleet(tmp_path):
    with pytest.raises(ConfigError, match="the file is empty"):
        parse_fleet("# nothing\n", "f")
    with pytest.raises(ConfigError, match="f:2: not YAML"):
        parse_fleet("model: a\n  b: [", "f")
    with pytest.raises(ConfigError, match="f:1: document"):
        parse_fleet("- 1\n", "f")
    with pytest.raises(ConfigError, match="No such file"):
        load_fleet(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not text"):
        load_fleet(tmp_path / "binary.yaml")
    with pytest.raises(ConfigError, match="nodes: is empty"):
        parse_fleet("model: Llama-3.1-8B\nnodes: []\n", "f")
    with pytest.raises(ConfigError, match="and 2 more"):
        parse_fleet("model: Llama-3.1-8B\nnodes: [{}]\nlinks: [{}, {}, {}, {}]\nx: 1", "f")
