"""`Milp`: a mixed-integer linear program written row by row, solved by HiGHS.

Owns the translation to the solver's arrays and back. Does not know what the variables mean. highspy is imported when
something is solved, so that `bimetal plan --help` does not pay for it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Terms = Sequence[tuple[ArrayLike, ArrayLike]]
"""Columns and their coefficients, summed."""
Status = Literal["optimal", "feasible", "infeasible", "unknown"]
"""feasible: stopped with a solution, by time or gap."""
INFINITY = float("inf")
_HEURISTICS = tuple(f"mip_heuristic_run_{name}" for name in ("rins", "rens", "root_reduced_cost"))


@dataclass(frozen=True, slots=True)
class Solved:
    """What the solver found. `bound` is a lower bound of the objective that no solution can beat."""

    status: Status
    objective: float
    bound: float
    values: Floats
    row_duals: Floats
    """Of a program without integers; empty otherwise."""


@cache
def _highspy() -> Any:
    """The module, greeted once: the first solver of a process writes a banner to file descriptor 1, whatever its options, and
    documents for programs go there."""
    highspy = importlib.import_module("highspy")
    sys.stdout.flush()
    kept, sink = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    try:
        highspy.Highs()
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(sink)
    return highspy


class Milp:
    """Minimise a linear objective under rows lower <= sum of terms <= upper."""

    def __init__(self) -> None:
        self._lower: list[Floats] = []
        self._upper: list[Floats] = []
        self._cost: list[Floats] = []
        self._integer: list[NDArray[np.bool_]] = []
        self.num_columns = 0
        self._rows: list[tuple[float, float, Indices, Floats]] = []

    def variables(
        self,
        number: int,
        *,
        lower: ArrayLike = 0.0,
        upper: ArrayLike = INFINITY,
        cost: ArrayLike = 0.0,
        integer: bool = False,
    ) -> Indices:
        """Indices of `number` new columns."""
        first = self.num_columns
        self.num_columns += number
        for store, value in ((self._lower, lower), (self._upper, upper), (self._cost, cost)):
            store.append(np.broadcast_to(np.asarray(value, dtype=np.float64), (number,)))
        self._integer.append(np.full(number, integer))
        return np.arange(first, self.num_columns)

    def row(self, terms: Terms, *, lower: float = -INFINITY, upper: float = INFINITY) -> int:
        """Index of a new row."""
        columns = [np.atleast_1d(np.asarray(c, dtype=np.int64)).ravel() for c, _ in terms]
        values = [
            np.broadcast_to(np.asarray(v, dtype=np.float64), column.shape)
            for column, (_, v) in zip(columns, terms, strict=True)
        ]
        index = np.concatenate(columns) if columns else np.empty(0, np.int64)
        value = np.concatenate(values) if values else np.empty(0)
        self._rows.append((lower, upper, index[value != 0], value[value != 0]))
        return len(self._rows) - 1

    def solve(
        self,
        *,
        relax: bool = False,
        gap: float = 0.0,
        time_limit_s: float = 60.0,
        start: Mapping[int, float] | None = None,
        at_most: float = INFINITY,
        heuristics: bool = True,
    ) -> Solved:
        """`relax`: without integers, and with duals. `start`: values of some columns, to be made a solution and begun from.
        `at_most`: only solutions whose objective is no higher; infeasible if there is none. `heuristics`: look for solutions
        in smaller programs too, which is lost time where only the bound matters."""
        highspy = _highspy()
        solver = highspy.Highs()
        solver.silent()
        solver.setOptionValue("time_limit", max(time_limit_s, 0.1))
        solver.setOptionValue("mip_rel_gap", gap)
        solver.setOptionValue("mip_abs_gap", 1e-9)
        solver.setOptionValue("random_seed", 0)
        for option in () if heuristics else _HEURISTICS:
            solver.setOptionValue(option, False)
        solver.passModel(self._model(highspy, relax))
        if at_most < INFINITY:
            cost = np.concatenate(self._cost)
            counted = np.flatnonzero(cost).astype(np.int32)
            solver.addRow(-highspy.kHighsInf, at_most, len(counted), counted, cost[counted])
        if start and not relax:
            solver.setSolution(
                len(start), np.array(list(start), dtype=np.int32), np.array(list(start.values()))
            )
        solver.run()
        info, found = solver.getInfo(), solver.getSolution()
        status = self._status(highspy, solver.getModelStatus(), info)
        is_mip = not relax and bool(np.concatenate(self._integer).any())
        objective = float(info.objective_function_value)
        return Solved(
            status=status,
            objective=objective if status in ("optimal", "feasible") else INFINITY,
            bound=float(info.mip_dual_bound) if is_mip else objective,
            values=np.array(found.col_value),
            row_duals=np.empty(0) if is_mip else np.array(found.row_dual),
        )

    def probe(self, fixes: Sequence[Mapping[int, tuple[float, float]]]) -> list[float]:
        """The objective without integers under each set of bounds in turn, in place of the columns' own; infinite: infeasible."""
        highspy = _highspy()
        solver = highspy.Highs()
        solver.silent()
        solver.passModel(self._model(highspy, relax=True))
        lower, upper = np.concatenate(self._lower), np.concatenate(self._upper)
        values = []
        for fix in fixes:
            for column, (low, high) in fix.items():
                solver.changeColBounds(column, low, high)
            solver.run()
            optimal = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
            values.append(float(solver.getInfo().objective_function_value) if optimal else INFINITY)
            for column in fix:
                solver.changeColBounds(column, lower[column], upper[column])
        return values

    @staticmethod
    def _status(highspy: Any, status: Any, info: Any) -> Status:
        kinds = highspy.HighsModelStatus
        if status == kinds.kOptimal:
            return "optimal"
        if status in (kinds.kInfeasible, kinds.kUnboundedOrInfeasible):
            return "infeasible"
        return "feasible" if info.primal_solution_status == 2 else "unknown"

    def _model(self, highspy: Any, relax: bool) -> Any:
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = self.num_columns, len(self._rows)
        lp.col_cost_ = np.concatenate(self._cost)
        lp.col_lower_ = np.concatenate(self._lower)
        lp.col_upper_ = np.concatenate(self._upper)
        lp.row_lower_ = np.array([row[0] for row in self._rows])
        lp.row_upper_ = np.array([row[1] for row in self._rows])
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.concatenate([[0], np.cumsum([len(row[2]) for row in self._rows])]).astype(
            np.int32
        )
        lp.a_matrix_.index_ = np.concatenate([row[2] for row in self._rows]).astype(np.int32)
        lp.a_matrix_.value_ = np.concatenate([row[3] for row in self._rows])
        if not relax:
            integer = np.concatenate(self._integer)
            kinds = highspy.HighsVarType
            lp.integrality_ = [kinds.kInteger if i else kinds.kContinuous for i in integer]
        return lp
