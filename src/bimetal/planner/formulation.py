"""The fleet decision as a mixed-integer program. Reads like the formulation in docs/planning.md.

    minimise    sum_g  price_g per_node_g nodes_g + own_g owned_g
    subject to
    capacity    sum_c z_tkc                                             <= N_tk                     each template, limits
    demand      sum_tk rate_tkc z_tkc                                   >= wanted_c served_c + loss_c + spare_c
    alike       alike_cp                                                <= sum_(tk of composition p) rate_tkc z_tkc
    main        alike_cp                                                <= wanted_c main_cp,          sum_p main_cp = 1
    loss        loss_c                                                  >= e_c (wanted_c served_c - sum_p alike_cp)
    gpus        sum_tk usage_tg N_tk + sum_f need_fg job_fg             <= owned_g + per_node_g nodes_g
    jobs        sum_g job_fg                                             = 1
    power       sum_g watts_g (owned_g + per_node_g nodes_g)            <= cap
    budget      the objective above                                     <= budget
    pools       sum_(g of one GPU) nodes_g <= its nodes,  own_g <= per_node_g sets_g,  sum sets_g <= its owned nodes
    spare       spare_c                                                  = level_1c + sum_l step_lc reached_lc
    reached     sum_(tk with rate_tkc >= level_lc) rate_tkc z_tkc       <= most_lc reached_lc + sum_(m > l) step_mc reached_mc

N, nodes integer; main, job, reached binary; z, owned, loss, spare not negative; served in [0, 1], 1 unless goodput is
maximised; for headroom all are one number that is. N_tk replicas of template t run to the limits of class k; z_tkc of them serve class c (time shared: step times are
affine in what they hold, so that shares add up). Each class has one main composition, and loses e of what others serve.

The last two rows are N+1, written and explained in `spare`.

Only templates in `core` appear so. Every other one is there without its integers (N = z, at the class's own limits), which
makes the program a relaxation of the one over all templates: its bound holds for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bimetal.planner.milp import Floats, Indices, Milp, Solved
from bimetal.planner.problem import Problem
from bimetal.planner.spare import keep_spare, reached_rates

GOODPUT_TIE_BREAK = 1e-6
"""Of a dollar an hour against a token per second: of equal goodput, the cheaper plan."""

LEAST_LOAD = 1e-4
"""Of one replica, that a class is taken to need at least: less than the solver's tolerance of whole numbers needs no replica."""

MOST_HEADROOM = 4.0
"""Multiple of the demand that a plan is made to serve at most with GPUs that are paid for anyway."""


@dataclass(frozen=True)
class Columns:
    """Where the variables are."""

    run: dict[tuple[int, int], int]
    """(t, k) to N."""
    share: dict[tuple[int, int, int], int]
    """(t, k, c) to z."""
    rest: Indices
    """Of continuous templates, in the order given."""
    nodes: Indices
    own: Indices
    served: Indices
    loss: Indices
    main: Indices
    """[C, P]."""
    jobs: Indices
    """[F, G]."""


@dataclass(frozen=True)
class Rows:
    """Rows whose duals price templates."""

    demand: Indices
    of_kind: Indices
    """[C, P]."""
    gpus: Indices
    reached: tuple[tuple[Floats, Indices], ...]
    """By class, levels and their rows; none without N+1."""


@dataclass(frozen=True)
class Program:
    milp: Milp
    columns: Columns
    rows: Rows


def formulate(
    problem: Problem,
    core: Sequence[int],
    rest: Sequence[tuple[int, int]],
    mains: NDArray[np.bool_] | None = None,
) -> Program:
    """`core`: templates with their integers; `rest`: (template, class) pairs without; `mains` [C, P]: compositions that may be
    a class's main one, None: any."""
    m = Milp()
    G, C, P = len(problem.owned), len(problem.wanted), problem.num_kinds
    maximise = problem.objective == "goodput"
    asked = np.maximum(problem.wanted, LEAST_LOAD * problem.rate.max(axis=(0, 1), initial=0.0))
    weight = {"cost": 1.0, "goodput": GOODPUT_TIE_BREAK, "headroom": 0.0, "fewest": 0.0}[problem.objective]
    node_usd = problem.price_usd_per_h * problem.per_node
    each = 1.0 if problem.objective == "fewest" else 0.0

    nodes_cost = weight * node_usd + each * problem.per_node
    nodes = m.variables(G, upper=problem.buyable_nodes, cost=nodes_cost, integer=True)
    own = m.variables(G, upper=problem.owned, cost=weight * problem.owned_usd_per_h + each)
    goodput = -asked * problem.tokens if maximise else 0.0
    if problem.objective == "headroom":
        served, most = np.repeat(m.variables(1, lower=1.0, upper=MOST_HEADROOM, cost=-1.0), C), MOST_HEADROOM
    else:
        served, most = m.variables(C, lower=0.0 if maximise else 1.0, upper=1.0, cost=goodput), 1.0
    loss = m.variables(C)
    may_be_main = np.ones(C * P) if mains is None else mains.ravel()
    main = m.variables(C * P, upper=may_be_main, integer=True).reshape(C, P)
    alike = m.variables(C * P).reshape(C, P)
    allowed = np.isfinite(problem.jobs)
    jobs = m.variables(allowed.size, upper=allowed.ravel().astype(float), integer=True).reshape(allowed.shape)
    spare = m.variables(C, upper=[np.inf if wanted else 0.0 for wanted in problem.spare])

    _share_stock(m, problem, nodes, own)
    run, share = _core_variables(m, problem, core)
    y = m.variables(len(rest))
    t_rest = np.array([t for t, _ in rest], dtype=np.int64)
    c_rest = np.array([c for _, c in rest], dtype=np.int64)
    rate_rest = problem.rate[t_rest, c_rest, c_rest]
    t_share = np.array([t for t, _, _ in share], dtype=np.int64)
    k_share = np.array([k for _, k, _ in share], dtype=np.int64)
    c_share = np.array([c for _, _, c in share], dtype=np.int64)
    z = np.array(list(share.values()), dtype=np.int64)
    rate = problem.rate[t_share, k_share, c_share]
    t_run = np.array([t for t, _ in run], dtype=np.int64)
    N = np.array(list(run.values()), dtype=np.int64)

    for (t, k), column in run.items():  # capacity
        shares = [share[t, k, c] for c in range(C) if (t, k, c) in share]
        m.row([(shares, 1.0), (column, -1.0)], upper=0.0)

    demand, of_kind = np.zeros(C, np.int64), np.zeros((C, P), np.int64)
    for c in range(C):
        mine, others = c_share == c, c_rest == c
        supply = [(z[mine], rate[mine]), (y[others], rate_rest[others])]
        wanted, lost = asked[c], problem.mixed_loss[c]
        demand[c] = m.row([*supply, (served[c], -wanted), (loss[c], -1.0), (spare[c], -1.0)], lower=0.0)
        for p in range(P):
            in_z, in_y = mine & (problem.kind[t_share] == p), others & (problem.kind[t_rest] == p)
            supply = [(z[in_z], rate[in_z]), (y[in_y], rate_rest[in_y])]
            of_kind[c, p] = m.row([*supply, (alike[c, p], -1.0)], lower=0.0)
            m.row([(alike[c, p], 1.0), (main[c, p], -wanted * most)], upper=0.0)
        m.row([(main[c], 1.0)], lower=1.0, upper=1.0)
        m.row([(loss[c], 1.0), (served[c], -lost * wanted), (alike[c], lost)], lower=0.0)
    reached, reaches = [], reached_rates(problem)
    for c in range(C):
        mine, others = c_share == c, c_rest == c
        by_level = (
            (z[mine], rate[mine], rate[mine]),
            (y[others], rate_rest[others], reaches[t_rest[others], c]),
        )
        needed = float(asked[c] * most * (1 + problem.mixed_loss[c]))
        reached.append(keep_spare(m, problem, c, needed, int(spare[c]), by_level))

    gpus = np.zeros(G, np.int64)
    need = np.where(allowed, problem.jobs, 0.0)
    for g in range(G):
        gpus[g] = m.row(
            [
                *((N, problem.usage[t_run, g]), (y, problem.usage[t_rest, g]), (jobs[:, g], need[:, g])),
                *((own[g], -1.0), (nodes[g], -float(problem.per_node[g]))),
            ],
            upper=0.0,
        )
    for f in range(len(problem.jobs)):
        m.row([(jobs[f], 1.0)], lower=1.0, upper=1.0)
    m.row([(own, problem.watts), (nodes, problem.watts * problem.per_node)], upper=problem.power_cap_w)
    m.row([(own, problem.owned_usd_per_h), (nodes, node_usd)], upper=problem.budget_usd_per_h)
    return Program(
        m,
        Columns(run, share, y, nodes, own, served, loss, main, jobs),
        Rows(demand, of_kind, gpus, tuple(reached)),
    )


def _core_variables(
    m: Milp, problem: Problem, core: Sequence[int]
) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int, int], int]]:
    """N and z of the templates in `core`. Limits that let in no class but those of others are left out."""
    run: dict[tuple[int, int], int] = {}
    share: dict[tuple[int, int, int], int] = {}
    for t in core:
        for k in range(problem.rate.shape[1]):
            served = np.flatnonzero(problem.rate[t, k] > 0)
            if k not in served:
                continue
            run[t, k] = int(m.variables(1, upper=most_replicas(problem, t), integer=True)[0])
            for c, column in zip(served, m.variables(len(served)), strict=True):
                share[t, k, int(c)] = int(column)
    return run, share


def _share_stock(m: Milp, problem: Problem, nodes: Indices, own: Indices) -> None:
    """One GPU at several power limits: each node at one of them. Whoever allows more nodes of one kind allows them in all."""
    for pool in problem.pools:
        kinds = np.array(pool.kinds)
        more = np.maximum(problem.buyable_nodes[kinds] - pool.nodes, 0.0).sum()
        m.row([(nodes[kinds], 1.0)], upper=pool.nodes + float(more))
        sets = m.variables(len(kinds), upper=pool.owned, integer=True)
        for g, of_kind in zip(kinds, sets, strict=True):
            m.row([(own[g], 1.0), (of_kind, -float(problem.per_node[g]))], upper=0.0)
        m.row([(sets, problem.per_node[kinds])], upper=pool.owned)


def most_replicas(problem: Problem, t: int) -> float:
    """For which there are GPUs."""
    used = problem.usage[t] > 0
    return float(np.floor((problem.largest_fleet[used] / problem.usage[t][used]).min()))


@dataclass(frozen=True)
class Chosen:
    """A solution in whole replicas."""

    replicas: dict[tuple[int, int], int]
    """(template, limits) to a number."""
    served_per_s: dict[tuple[int, int, int], float]
    """(template, limits, class) to requests per second that it is given room for."""
    nodes: Indices
    owned_used: Floats
    served_ratio: Floats
    lost_per_s: Floats
    """[C] requests per second that replicas of unlike GPUs lose between them."""
    jobs: dict[int, int]
    """Job to kind of GPU."""
    usd_per_h: float

    def num_gpus(self, problem: Problem) -> float:
        """Bought, rented, or owned and used."""
        return float(self.nodes @ problem.per_node + self.owned_used.sum())


def read_solution(problem: Problem, program: Program, solved: Solved) -> Chosen:
    """From the solver's values. Replicas that serve nobody cost nothing where GPUs are paid for; they are left out."""
    x, cols = solved.values, program.columns
    numbers = {key: round(x[i]) for key, i in cols.run.items() if round(x[i]) > 0}
    served = {
        key: float(x[i]) * problem.rate[key]
        for key, i in cols.share.items()
        if x[i] > 1e-9 and key[:2] in numbers
    }
    working = {key[:2] for key in served}
    replicas = {key: number for key, number in numbers.items() if key in working}
    nodes = np.round(x[cols.nodes]).astype(np.int64)
    own = np.round(x[cols.own], 6)
    cost = nodes * problem.per_node * problem.price_usd_per_h + own * problem.owned_usd_per_h
    return Chosen(
        replicas=replicas,
        served_per_s=served,
        nodes=nodes,
        owned_used=own,
        served_ratio=x[cols.served],
        lost_per_s=x[cols.loss],
        jobs={f: int(np.argmax(x[row])) for f, row in enumerate(cols.jobs)},
        usd_per_h=float(cost.sum()),
    )
