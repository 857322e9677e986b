"""The catalogue's figures in base units, their sources, and names nearly right."""

import pytest

from bimetal.catalog.hardware import CPU, catalogue, cpu_spec, find_gpu, override
from bimetal.catalog.links import SAME_HOST, find_link, group_bytes_per_s
from bimetal.errors import ConfigError


def test_figures_are_in_base_units():
    spec = find_gpu("MI300X")
    assert spec.memory_bytes == 192e9
    assert spec.memory_bytes_per_s == pytest.approx(5.3e12)
    assert spec.bf16_flops_per_s == pytest.approx(1.307e15)
    assert spec.scaleup_bytes_per_s == pytest.approx(448e9)
    assert spec.on_demand_usd_per_h == (1.5, 6.0)
    assert spec.vendor == "AMD"


def test_every_entry_has_what_planning_needs_and_says_where_from():
    assert len(catalogue()) >= 16
    for spec in catalogue().values():
        assert spec.memory_bytes > 1e10, spec.name
        assert spec.memory_bytes_per_s > 5e11, spec.name
        assert spec.bf16_flops_per_s > 1e14, spec.name
        assert spec.sources["memory_bytes"], spec.name


def test_short_names_mean_the_first_of_the_kind():
    assert find_gpu("h100").name == "H100-SXM-80GB"
    assert find_gpu("H100-PCIe").name == "H100-PCIe-80GB"
    assert find_gpu("MI300X") is find_gpu(" mi300x ")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("H10", "H100"), ("MI300", "MI300X"), ("mi-300x", "MI300X"), ("TPU-v5", "use one of A100")],
)
def test_a_wrong_name_is_answered_with_near_ones(name, hint):
    with pytest.raises(ConfigError, match=hint):
        find_gpu(name)


def test_unverified_figures_are_marked_by_field():
    assert find_gpu("H100").unverified == frozenset()
    assert "memory_bytes_per_s" in find_gpu("H100-NVL").unverified
    assert find_gpu("MI250X").unverified == {"tdp_w", "scaleup_bytes_per_s"}
    assert find_gpu("GB300").unverified_of("tdp_w", "memory_bytes") == ("tdp_w",)
    assert find_gpu("MI300X").unverified == {"purchase_usd"}


def test_peak_falls_back_to_the_next_wider_format():
    assert find_gpu("H100").flops_per_s("float4") == find_gpu("H100").flops_per_s("float8")
    assert find_gpu("A100").flops_per_s("float8") == find_gpu("A100").flops_per_s("bfloat16")
    assert find_gpu("B200").flops_per_s("float4") == pytest.approx(9e15)
    assert find_gpu("A100").flops_per_s("float32") == find_gpu("A100").bf16_flops_per_s / 2


def test_cpu_takes_given_figures_and_marks_defaults():
    spec = cpu_spec(memory_bytes=1e9, flops_per_s=1e11)
    assert (spec.name, spec.memory_bytes, spec.bf16_flops_per_s) == (CPU, 1e9, 1e11)
    assert spec.unverified == {"memory_bytes_per_s"}
    assert spec.flops_per_s("float32") == 1e11


def test_override_changes_value_and_source():
    spec = override(find_gpu("H100-NVL"), memory_bytes=90e9)
    assert spec.memory_bytes == 90e9
    assert spec.sources["memory_bytes"] == "fleet file"
    assert "memory_bytes" not in spec.unverified
    assert "memory_bytes_per_s" in spec.unverified
    assert override(find_gpu("H100")) is find_gpu("H100")


def test_a_mesh_group_gets_its_share_of_links_and_a_switch_gives_all():
    mi300x, h100 = find_gpu("MI300X"), find_gpu("H100")
    assert group_bytes_per_s(mi300x, 2) == pytest.approx(64e9)
    assert group_bytes_per_s(mi300x, 8) == pytest.approx(448e9)
    assert group_bytes_per_s(h100, 2) == group_bytes_per_s(h100, 8) == pytest.approx(450e9)
    assert group_bytes_per_s(h100, 1) is None


def test_named_links():
    assert find_link("25gbe").bandwidth_bytes_per_s == pytest.approx(25e9 / 8 * 0.9415, rel=1e-3)
    assert find_link("same-host") is SAME_HOST
    with pytest.raises(ConfigError, match="did you mean"):
        find_link("100G")
