"""Verdicts follow from numbers: they flip where the audit says that they flip."""

import time
from pathlib import Path

import pytest

from bimetal.cli.tco_audit import audit_document, audit_markdown
from bimetal.cli.tco_model import answers
from bimetal.economics.audit import Check, Given, claims, judge
from bimetal.economics.judged import SETTLED_BY, judge_claims

DOCS = Path(__file__).parents[2] / "docs"
NEAR = 1e-6


@pytest.fixture(scope="module")
def judged():
    return judge_claims(answers())


def test_audit_takes_less_than_five_seconds():
    start = time.perf_counter()
    judge_claims(answers())
    assert time.perf_counter() - start < 5.0


def test_every_claim_is_judged_or_says_what_would_settle_it(judged):
    assert [c.claim.id for c in judged] == list(claims())
    assert {c.claim.id for c in judged if not c.readings} == set(SETTLED_BY)


def test_every_verdict_flips_at_the_reported_break_even(judged):
    readings = [j for c in judged for j in c.readings]
    assert len(readings) > 50
    for j in readings:
        assert j.break_even is not None, (j.check.claim, j.check.reading)
        below, above = (j.check.holds(**{j.check.lever: j.break_even * (1 + s * NEAR)}) for s in (-1, 1))
        assert below != above, (j.check.claim, j.check.reading, j.break_even)


def test_no_verdict_flips_between_today_and_the_break_even(judged):
    for j in (j for c in judged for j in c.readings):
        now = j.check.inputs[j.check.lever].value
        for share in (0.1, 0.3, 0.5, 0.7, 0.9, 0.999):
            x = now + share * (j.break_even - now)
            assert j.check.holds(**{j.check.lever: x}) == j.check.holds(), (j.check.claim, j.check.reading, x)


def test_perturbing_other_inputs_moves_the_break_even_and_it_still_flips_there(judged):
    """The break-even is solved for, not written down: change any other input by 3% and solve again."""
    for j in (j for c in judged for j in c.readings):
        for name, given in j.check.inputs.items():
            if name == j.check.lever:
                continue
            moved = Given(given.value * 1.03, given.low * 1.03, given.high * 1.03, given.source)
            inputs = {**j.check.inputs, name: moved}
            again = judge(
                Check(
                    j.check.claim, j.check.reading, j.check.formula, inputs, j.check.compute, j.check.relation,
                    j.check.target, j.check.lever, j.check.unit, j.check.tolerance_ratio,
                )
            )  # fmt: skip
            if again.break_even is None:
                continue
            below, above = (
                again.check.holds(**{j.check.lever: again.break_even * (1 + s * NEAR)}) for s in (-1, 1)
            )
            assert below != above, (j.check.claim, j.check.reading, name)


def readings_of(judged, claim):
    return {j.check.reading: j for c in judged if c.claim.id == claim for j in c.readings}


def test_known_results_by_hand(judged):
    # 8% cheaper and 92% of the work is the same cost per unit of work.
    work = readings_of(judged, "C17")["saved, per unit of work (C10)"]
    assert work.recomputed == pytest.approx(0.0, abs=1e-12) and work.verdict == "does not hold"
    # 400 x 70 W x 8.76 kh = 245,280 kWh: 80,000 USD at 0.326 USD; 400 x 127.5 W: 446,760 kWh, 0.179 USD.
    power = readings_of(judged, "C15")
    assert power["chip power"].break_even == pytest.approx(80_000 / 245_280)
    assert power["system power"].break_even == pytest.approx(80_000 / 446_760)
    # 0.00005 x 1e12 = 50 million if prices are per token, 50 if per million tokens.
    tokens = readings_of(judged, "C20")
    assert [j.recomputed for j in tokens.values()] == pytest.approx([50e6, 50.0])
    # (30 + 24) of 60 saves 10%; (30 + 24) of 90 saves 40%.
    split = readings_of(judged, "C39")
    assert split["chip for chip"].recomputed == pytest.approx(0.10)
    assert split["one MI300X for two H100"].recomputed == pytest.approx(0.40)
    # 2.4 + 3 x (1.2 - 0.05) = 5.85 of 30 million.
    assert readings_of(judged, "C21")["its own parts over chips alone"].recomputed == pytest.approx(0.195)
    assert readings_of(judged, "C05")["peak, similar read as within 10%"].recomputed == pytest.approx(
        5.3 / 3.35
    )


def test_throughput_claims_carry_the_models_interval(judged):
    modelled = [r for c in audit_document(judged) for r in c["readings"] if r["is_model"]]
    assert len(modelled) >= 5
    for reading in modelled:
        given = reading["inputs"][reading["lever"]]
        assert given["low"] < given["value"] < given["high"] and "performance model" in given["source"]


def test_the_page_in_docs_is_this_audit(judged):
    assert (DOCS / "audit.md").read_text(encoding="utf-8") == audit_markdown(judged)
