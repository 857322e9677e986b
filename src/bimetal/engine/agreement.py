"""How far two placements of a model agree: from what each generated and how each scored the same tokens, to figures.

Pure: it knows transcripts, not engines. Two vendors' kernels never round alike, so that some greedy continuations fork
where the two best tokens were nearly equal; the figures here tell such a fork from a mistake.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bimetal.engine.wire.api import TokenLogprob

MARGIN_BY_DTYPE = {"float32": 1e-4, "float16": 2**-6, "bfloat16": 2**-3}
"""A fork is rounding's doing where the margin is at most this. For 16 bits: the distance of neighbouring numbers between
16 and 32, where the largest logits lie; for float32: far above what sums of different order differ by."""

_LEAST_MASS = 1e-9


@dataclass(frozen=True, slots=True)
class Transcript:
    """What one placement made of one prompt."""

    greedy: tuple[int, ...]
    """Its own greedy continuation."""
    scores: tuple[TokenLogprob, ...]
    """Of the prompt and A's continuation together: one for each token but the first."""


@dataclass(frozen=True, slots=True)
class Fork:
    """Where two greedy continuations part. Margins are differences of log-probabilities after the same tokens."""

    a_token: int
    b_token: int
    a_margin: float
    """By how much A prefers its own token to B's. At least this much, where B's is not among the tokens that A reports."""
    b_margin: float
    is_explained: bool
    """A was undecided by no more than the limit."""


@dataclass(frozen=True, slots=True)
class PromptAgreement:
    """Of one prompt."""

    num_prompt_tokens: int
    num_agreed: int
    """Greedy tokens before the fork."""
    fork: Fork | None


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of a set of prompts. Divergences are D(A || B) of the next token's distribution, in nats."""

    prompts: tuple[PromptAgreement, ...]
    num_greedy_tokens: int
    """Of each continuation."""
    agreed_min: int
    agreed_median: float
    num_forks: int
    num_unexplained_forks: int
    margin_limit: float
    num_positions: int
    """Whose next token both scored: after every prompt token and every token of A's continuation."""
    top1_ratio: float
    """Share of positions at which both find the same token the most probable."""
    kl_mean: float
    kl_p99: float
    kl_max: float
    is_exact: bool
    """Whole distributions were compared; else heads, with the rest as one more outcome, which bounds KL from below."""
    num_top: int
    """Tokens of each distribution's head."""
    rest_mean: float
    """Probability (A's) of the tokens outside the heads: mean and largest over the positions."""
    rest_max: float


def compare(
    prompts: Sequence[Sequence[int]],
    a: Sequence[Transcript],
    b: Sequence[Transcript],
    vocab_size: int,
    margin_limit: float,
) -> Agreement:
    """`a` and `b` hold a transcript for each of `prompts`, which are token ids; b's scores are of a's continuations."""
    found = tuple(_agreement(*each, margin_limit) for each in zip(prompts, a, b, strict=True))
    pairs = [pair for x, y in zip(a, b, strict=True) for pair in zip(x.scores, y.scores, strict=True)]
    divergences = [divergence(x, y, vocab_size) for x, y in pairs]
    kls = np.array([kl for kl, _ in divergences])
    rests = np.array([rest for _, rest in divergences])
    num_top = min(len(x.top_ids) for x, _ in pairs)
    forks = [p.fork for p in found if p.fork is not None]
    return Agreement(
        prompts=found,
        num_greedy_tokens=len(a[0].greedy),
        agreed_min=min(p.num_agreed for p in found),
        agreed_median=statistics.median(p.num_agreed for p in found),
        num_forks=len(forks),
        num_unexplained_forks=sum(not fork.is_explained for fork in forks),
        margin_limit=margin_limit,
        num_positions=len(pairs),
        top1_ratio=statistics.mean(x.top_ids[0] == y.top_ids[0] for x, y in pairs),
        kl_mean=float(kls.mean()),
        kl_p99=float(np.percentile(kls, 99)),
        kl_max=float(kls.max()),
        is_exact=num_top >= vocab_size,
        num_top=num_top,
        rest_mean=float(rests.mean()),
        rest_max=float(rests.max()),
    )


def divergence(a: TokenLogprob, b: TokenLogprob, vocab_size: int) -> tuple[float, float]:
    """(D(a || b) in nats, a's mass outside the tokens that both report).

    Tokens outside count as one outcome. Merging outcomes never raises the divergence, so it is a lower bound, and exact
    where both report the whole vocabulary.

    >>> half = TokenLogprob(0.0, 1, (0, 1), (math.log(0.5), math.log(0.5)))
    >>> skew = TokenLogprob(0.0, 1, (0, 1), (math.log(0.8), math.log(0.2)))
    >>> kl, rest = divergence(half, skew, 2)
    >>> round(kl, 4), rest
    (0.2231, 0.0)
    """
    others = dict(zip(b.top_ids, b.top_logprobs, strict=True))
    shared = [
        (p, others[token]) for token, p in zip(a.top_ids, a.top_logprobs, strict=True) if token in others
    ]
    kl = math.fsum(math.exp(p) * (p - q) for p, q in shared if p > -math.inf)
    if len(shared) >= vocab_size:
        return max(kl, 0.0), 0.0
    rest_a = max(1.0 - math.fsum(math.exp(p) for p, _ in shared), 0.0)
    # A sum that rounds to one must not make the other side infinitely surprising; raising it only lowers the bound.
    rest_b = max(1.0 - math.fsum(math.exp(q) for _, q in shared), _LEAST_MASS)
    if rest_a > _LEAST_MASS:
        kl += rest_a * math.log(rest_a / rest_b)
    return max(kl, 0.0), rest_a


def _agreement(prompt: Sequence[int], a: Transcript, b: Transcript, margin_limit: float) -> PromptAgreement:
    agreed = 0
    for x, y in zip(a.greedy, b.greedy, strict=True):
        if x != y:
            break
        agreed += 1
    if agreed == len(a.greedy):
        return PromptAgreement(len(prompt), agreed, None)
    a_token, b_token = a.greedy[agreed], b.greedy[agreed]
    row = len(prompt) - 1 + agreed
    a_margin = _margin(a.scores[row], a_token, b_token)
    b_margin = _margin(b.scores[row], b_token, a_token)
    fork = Fork(a_token, b_token, a_margin, b_margin, a_margin <= margin_limit)
    return PromptAgreement(len(prompt), agreed, fork)


def _margin(scores: TokenLogprob, chosen: int, other: int) -> float:
    reported = dict(zip(scores.top_ids, scores.top_logprobs, strict=True))
    least = scores.top_logprobs[-1]
    return reported.get(chosen, least) - reported.get(other, least)
