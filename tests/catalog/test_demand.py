"""Demand files: what they say, and what is wrong with them in words that help."""

import pytest

from bimetal.catalog.demand import is_demand, load_demand, parse_demand
from bimetal.catalog.document import Document
from bimetal.catalog.hardware import find_gpu
from bimetal.errors import ConfigError

GOOD = """\
stock:
  - {gpu: H100, count: 64}
  - {gpu: MI300X, count: 64, owned: 8, purchase_usd: 12000, amortise_years: 3}
links: [{between: [H100, MI300X], kind: 100GbE}]
models: [{name: Llama-3.1-70B, dtype: float8}]
demand:
  - {name: chat, kind: interactive, model: Llama-3.1-70B, rate_per_s: 10, input_tokens: 1000, output_tokens: 200,
     ttft_p99_s: 2, tpot_p99_s: 0.1}
  - {name: night, kind: batch, model: Llama-3.1-70B, requests: 1e6, input_tokens: 500, output_tokens: 100, deadline_h: 8}
  - {name: tune, kind: fine-tuning, gpu_hours: 100, deadline_h: 10}
site: {electricity_usd_per_kwh: 0.1, power_cap_w: 300e3}
"""


def wrong(old, new, match):
    assert old in GOOD
    with pytest.raises(ConfigError, match=match) as error:
        parse_demand(GOOD.replace(old, new, 1), "d.yaml")
    assert str(error.value).startswith("d.yaml:")


def test_a_good_file_and_its_prices():
    demand = parse_demand(GOOD, "d.yaml")
    h100, mi300x = demand.stock
    assert h100.usd_per_h(0.1) == find_gpu("H100").rental_usd_per_h  # rental includes power
    power = mi300x.watts / 1000 * 0.1
    assert mi300x.usd_per_h(0.1) == pytest.approx(12000 / (3 * 8760) + power)
    assert mi300x.power_usd_per_h(0.1) == pytest.approx(power)
    assert mi300x.num_buyable_nodes == 7
    assert demand.link_between(find_gpu("MI300X"), find_gpu("H100")).name == "100GbE"
    assert demand.link_between(find_gpu("H100"), find_gpu("H100")).name == "25GbE"
    assert is_demand(Document(GOOD, "d"))
    assert not is_demand(Document("model: x\nnodes: []", "f"))


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("gpu: H100,", "gpu: H1000,", r"stock\[0\].gpu: .*H1000.* did you mean"),
        ("count: 64}", "count: 0}", r"d.yaml:2: stock\[0\].count: .*greater than or equal to 1.*got 0"),
        ("count: 64}", "count: -8}", r"stock\[0\].count"),
        ("count: 64}", "count: 4}", r"4 is less than one node of 8"),
        ("count: 64}", "count: 64, price_usd_per_h: -1}", r"stock\[0\].price_usd_per_h: .*got -1"),
        ("purchase_usd: 12000", "purchase_usd: 0", r"stock\[1\].purchase_usd: .*greater than 0"),
        ("owned: 8", "owned: 12", r"owned: 12 is no multiple of per_node 8"),
        ("owned: 8", "owned: 72", r"owned: 72 is more than count 64"),
        (
            "gpu: MI300X, count: 64, owned: 8, purchase_usd: 12000, amortise_years: 3",
            "gpu: L40S, count: 8",
            "no rental price of L40S",
        ),
        ("{gpu: MI300X,", "{gpu: H100-SXM-80GB,", "H100-SXM-80GB is given twice"),
        ("kind: 100GbE", "kind: 100GbX", r"links\[0\]: link '100GbX'"),
        ("[H100, MI300X], kind", "[H100, B200], kind", "B200-SXM-180GB is not in stock"),
        (
            "{name: Llama-3.1-70B, dtype",
            "{name: Llama-9, dtype",
            r"models\[0\].name: model 'Llama-9' is neither",
        ),
        (
            "kind: interactive, model: Llama-3.1-70B",
            "kind: interactive, model: Mixtral",
            "'Mixtral' is not under `models`",
        ),
        ("ttft_p99_s: 2, ", "", r"demand\[0\].ttft_p99_s: is missing: interactive work needs it"),
        ("tpot_p99_s: 0.1", "tpot_p99_s: 0", r"demand\[0\].tpot_p99_s: .*greater than 0"),
        ("rate_per_s: 10", "rate_per_s: .nan", r"demand\[0\].rate_per_s"),
        ("rate_per_s: 10, ", "", r"demand\[0\].rate_per_s: is missing: give it, or a trace"),
        ("rate_per_s: 10", "rate_per_s: 10, trace: t.csv", "is given beside a trace"),
        ("deadline_h: 8", "deadline_h: 8, tpot_p99_s: 1", "does not go with batch work"),
        (
            "deadline_h: 8",
            "deadline_h: 8, compress: 2",
            r"compress: goes with the trace of interactive work only",
        ),
        (
            "rate_per_s: 10",
            "rate_per_s: 10, compress: 2",
            r"compress: goes with the trace of interactive work only",
        ),
        ("purchase_usd: 12000", "purchase_usd: 12000, price_usd_per_h: 1", "bought or rented, keep one"),
        ("input_tokens: 1000", "input_tokens: 200000", "more than the 131072 positions"),
        ("name: night", "name: chat", "'chat' is given twice"),
        ("gpu_hours: 100", "gpu_hours: 100, gpus: [B200]", "B200-SXM-180GB is not in stock"),
        ("site: {", "site: {power_cap: 3, ", "site.power_cap: is not a field here"),
        ("site: {", "default_link: 3GbE\nsite: {", "default_link: link '3GbE'"),
    ],
)
def test_bad_input_names_line_value_and_remedy(old, new, match):
    wrong(old, new, match)


def test_an_empty_section_and_an_unreadable_file(tmp_path):
    with pytest.raises(ConfigError, match="demand: is empty"):
        parse_demand("stock: [{gpu: H100, count: 8}]\nmodels: []\ndemand: []\n", "d.yaml")
    with pytest.raises(ConfigError, match="No such file"):
        load_demand(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("count: 64}", "count: true}", r"d.yaml:2: stock\[0\].count"),
        ("owned: 8", "owned: no", r"d.yaml:3: stock\[1\].owned"),
        ("amortise_years: 3", "amortise_years: on", r"stock\[1\].amortise_years"),
        ("count: 64}", "count: 64, price_usd_per_h: false}", r"stock\[0\].price_usd_per_h"),
        ("rate_per_s: 10", "rate_per_s: true", r"d.yaml:7: demand\[0\].rate_per_s"),
        ("ttft_p99_s: 2", "ttft_p99_s: yes", r"demand\[0\].ttft_p99_s"),
        ("gpu_hours: 100", "gpu_hours: true", r"demand\[2\].gpu_hours"),
        ("electricity_usd_per_kwh: 0.1", "electricity_usd_per_kwh: true", "site.electricity_usd_per_kwh"),
        ("site: {", "site: {max_num_seqs: true, ", "site.max_num_seqs"),
        ("stock:", "seed: true\nstock:", "d.yaml:1: seed"),
    ],
)
def test_a_boolean_is_no_number(old, new, where):
    wrong(old, new, rf"{where}: must be a number.*got the boolean")


def test_booleans_stay_where_they_belong():
    demand = parse_demand(GOOD.replace("rate_per_s: 10", "n_plus_one: yes, rate_per_s: 10"), "d.yaml")
    assert demand.demand[0].n_plus_one is True
