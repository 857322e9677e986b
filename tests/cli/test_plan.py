"""`bimetal plan` as a user meets it."""

import json
import subprocess
import sys
from pathlib import Path
from time import perf_counter

import pytest
from click.testing import CliRunner

from bimetal.cli.plan import command
from bimetal.errors import ConfigError
from bimetal.plan import load_plan

EXAMPLE = Path(__file__).parents[2] / "examples" / "fleet.yaml"


def test_table_fits_80_columns_and_names_every_stage():
    result = CliRunner().invoke(command, [str(EXAMPLE)], env={"COLUMNS": "80"}, catch_exceptions=False)
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
    for word in ("green", "H100-SXM-80GB", "MI300X", "weights", "KV tokens", "output tok/s"):
        assert word in result.output


def test_json_and_file_are_the_same_plan(tmp_path):
    written = tmp_path / "plan.yaml"
    result = CliRunner().invoke(command, [str(EXAMPLE), "--json", "-o", str(written)], catch_exceptions=False)
    document = json.loads(result.output)
    plan = load_plan(written)
    assert document["model"] == plan.model == "Llama-3.1-70B"
    assert document["predicted_output_tokens_per_s"] == plan.predicted_output_tokens_per_s


def test_a_bad_path_is_an_error_for_people(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        CliRunner().invoke(command, [str(tmp_path / "none.yaml")], catch_exceptions=False)
    with pytest.raises(ConfigError, match="a folder that exists"):
        CliRunner().invoke(command, [str(EXAMPLE), "-o", str(tmp_path / "no" / "x")], catch_exceptions=False)


def test_help_starts_at_once_and_planning_needs_no_torch():
    code = (
        "import sys; from bimetal.cli.plan import command; command([sys.argv[1]], standalone_mode=False); "
        "heavy = {'torch', 'triton', 'pandas', 'scipy', 'transformers'} & set(sys.modules); sys.exit(repr(heavy) if heavy else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(EXAMPLE)], capture_output=True).returncode == 0
    times = []
    for _ in range(3):
        started = perf_counter()
        subprocess.run(
            [sys.executable, "-m", "bimetal.cli.main", "plan", "--help"], check=True, capture_output=True
        )
        times.append(perf_counter() - started)
    assert min(times) < 0.5
