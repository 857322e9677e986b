"""Every claim with its readings judged; a claim that no calculation reaches is an assertion."""

from __future__ import annotations

from dataclasses import dataclass

from bimetal.economics.audit import Claim, Judgement, claims, judge
from bimetal.economics.claims_fleet import fleet_checks
from bimetal.economics.claims_performance import ModelAnswers, performance_checks
from bimetal.economics.claims_prices import price_checks

ASSERTION = "cannot be computed: an assertion"

SETTLED_BY = {
    "C12": "both kinds of kernel timed side by side on an MI300X",
    "C13": "both backends of ONNX Runtime timed on the versions meant",
    "C24": "two signed contracts, with and without the clause",
    "C25": "competing quotes",
    "C26": "the quote before and after",
    "C28": "the reserved contract's terms",
    "C35": "a trace of a running fleet's idle times",
    "C37": "a record of the work",
    "C38": "measured goodput per class of work on both vendors",
    "C41": "the fix and its benchmark",
    "C42": "the contracts' uptime clauses",
    "C43": "the support contract",
    "C44": "the reserved contract's terms",
    "C45": "resale prices after the launch, by date",
    "C47": "the list of platforms that its documentation supports",
}
"""What would have to be shown, for claims that rest on somebody's word."""


@dataclass(frozen=True, slots=True)
class JudgedClaim:
    """A claim and its readings; none: an assertion, settled by what is named."""

    claim: Claim
    readings: tuple[Judgement, ...]

    @property
    def settled_by(self) -> str:
        return "" if self.readings else SETTLED_BY.get(self.claim.id, "a measurement")


def judge_claims(model: ModelAnswers) -> tuple[JudgedClaim, ...]:
    """In the order of the claims file."""
    checks = (*price_checks(), *fleet_checks(), *performance_checks(model))
    return tuple(
        JudgedClaim(claim, tuple(judge(check) for check in checks if check.claim == claim.id))
        for claim in claims().values()
    )
