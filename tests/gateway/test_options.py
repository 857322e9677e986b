from __future__ import annotations

import pytest

from bimetal.engine.wire.options import EngineOptions
from bimetal.errors import ConfigError


def test_json_round_trip() -> None:
    options = EngineOptions(plan={"model": "m", "replicas": []}, kv_cache_bytes=1 << 30, load_format="dummy")
    assert EngineOptions.from_json(options.to_json()) == options


def test_defaults_stay_off_the_command_line() -> None:
    assert EngineOptions(plan={}).to_json() == '{"plan":{}}'


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"plan":{},"max_num_seqs":0}', "max_num_seqs"),
        ('{"plan":{},"gpu_memory_utilization":1.5}', "gpu_memory_utilization"),
        ('{"plan":{},"dtype":"int3"}', "dtype"),
        ('{"plan":{},"link":"pigeon"}', "link"),
        ('{"plan":{},"seed":-1}', "seed"),
        ('{"plan":{},"unknown":1}', "unknown"),
        ("{}", "plan"),
        ("nonsense", "document"),
    ],
)
def test_a_bad_option_is_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EngineOptions.from_json(text)
