"""Three published formats, and every fault named with its line."""

import time

import numpy as np
import pytest

from bimetal.errors import ConfigError
from bimetal.simulate.trace import load_trace, poisson_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,x\n45,GPT-4,1087,230,1317,x\n"
MOONCAKE = '{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0]}\n{"timestamp": 3000, "input_length": 7322, "output_length": 490, "hash_ids": []}\n'


@pytest.mark.parametrize(
    ("text", "gap", "inputs", "outputs"),
    [
        (AZURE, 4.314579, [374, 396], [44, 109]),
        (BURST, 40, [472, 1087], [18, 230]),
        (MOONCAKE, 3, [6758, 7322], [500, 490]),
    ],
)
def test_formats(tmp_path, text, gap, inputs, outputs):
    path = tmp_path / "trace"
    path.write_text(text)
    trace = load_trace(path)
    assert trace.arrival_s == pytest.approx([0, gap], abs=1e-5)
    assert trace.input_tokens.tolist() == inputs
    assert trace.output_tokens.tolist() == outputs
    assert trace.compressed(2).arrival_s[1] == pytest.approx(gap / 2, abs=1e-5)
    assert len(trace.first(1)) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "has the columns a, b, but needs TIMESTAMP"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        (AZURE.replace("18:15:50", "18:15:40"), r":3: TIMESTAMP .* is earlier than the request before"),
        (AZURE.replace(",396,", ",many,"), r":3: ContextTokens 'many' is not a number"),
        (AZURE.replace(",396,", ",-3,"), r":3: ContextTokens '-3' must be between 0"),
        (
            AZURE.replace("2023-11-16 18:15:50.9951690", "noon"),
            r":3: TIMESTAMP 'noon' is neither seconds nor",
        ),
        ('{"timestamp": 1}\n{', r":2: not JSON"),
        (MOONCAKE.replace('"input_length": 7322, ', ""), r":2: input_length is missing"),
        (AZURE.replace(",396,109", ",396"), r":3: GeneratedTokens is missing"),
        (AZURE + "5,1," + "9" * 200_000 + "\n", r"not CSV: field larger than"),
        ('{"timestamp": 1}\n[1]', r":2: expected an object, got list"),
    ],
)
def test_faults(tmp_path, text, message):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_trace(path)


@pytest.mark.parametrize("text", [AZURE, BURST, MOONCAKE])
def test_a_byte_order_mark_windows_line_ends_and_blank_lines_change_nothing(tmp_path, text):
    plain, odd = tmp_path / "plain", tmp_path / "odd"
    plain.write_text(text)
    odd.write_bytes(("\ufeff" + text.replace("\n", "\r\n\r\n")).encode())
    assert load_trace(odd).arrival_s.tolist() == load_trace(plain).arrival_s.tolist()
    assert load_trace(odd).input_tokens.tolist() == load_trace(plain).input_tokens.tolist()


@pytest.mark.parametrize("text", [AZURE.replace("396", "many"), MOONCAKE.replace("7322", '"many"')])
def test_blank_lines_are_lines(tmp_path, text):
    path = tmp_path / "trace"
    path.write_text(text.replace("\n", "\n\n\n"))
    wrong = next(i for i, line in enumerate(path.read_text().split("\n"), start=1) if "many" in line)
    with pytest.raises(ConfigError, match=rf":{wrong}: .*'many'"):
        load_trace(path)


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
def test_dates_mean_the_same_on_every_machine(tmp_path, zone, monkeypatch):
    """The night when clocks are put back; and pandas' dates, which lack fractions where they are 0."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        path = tmp_path / "trace"
        path.write_text(
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-10-29 01:00:00,1,1\n2023-10-29 04:00:00,1,1\n"
        )
        assert load_trace(path).arrival_s[1] == 3 * 3600
        path.write_text(
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.500000+00:00,1,1\n2024-05-10 00:00:01+00:00,1,1\n"
        )
        assert load_trace(path).arrival_s[1] == 0.5
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_missing_file_and_bad_numbers(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_trace(tmp_path / "none")
    with pytest.raises(ConfigError, match="compression 0"):
        poisson_trace(10, 1, 10, 10, seed=0).compressed(0)
    with pytest.raises(ConfigError, match="requests_per_s -1"):
        poisson_trace(10, -1, 10, 10, seed=0)


def test_a_poisson_trace_has_the_rate_and_lengths_asked_for():
    trace = poisson_trace(20_000, 7.0, 300, 80, seed=0)
    assert len(trace) / trace.arrival_s[-1] == pytest.approx(7, rel=0.03)
    assert trace.input_tokens.mean() == pytest.approx(300, rel=0.03)
    assert trace.output_tokens.mean() == pytest.approx(80, rel=0.03)
    assert np.diff(trace.arrival_s).min() >= 0
