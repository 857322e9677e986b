"""A scenario as a workbook with live formulas: change an input, and every total moves.

One sheet of inputs with source and date, one ledger a fleet (a row a payment: when, how much, its present value), one
summary. The formulas are those of `lines` and `tco`, written for a spreadsheet; a test recalculates them and compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from openpyxl import Workbook
from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE
from openpyxl.styles import Font
from openpyxl.worksheet.worksheet import Worksheet

from bimetal.economics.scenario import Scenario, plan_rate_path
from bimetal.economics.scenario_file import FleetFields, GroupFields
from bimetal.economics.tco import S_PER_YEAR
from bimetal.units import HOURS_PER_YEAR, KILO, MEGA, MONTHS_PER_YEAR, WEEKS_PER_YEAR

BOLD = Font(bold=True)
FIRST_ROW = 2
SURCHARGES = ("network", "installation", "duty", "vat")

Ref = Callable[[str], str]
"""Path of an input to its cell; to 0 where the scenario has no such input."""


@dataclass(frozen=True, slots=True)
class Payment:
    """A row of the ledger; `time` and `amount` are formulas without their equals sign."""

    label: str
    level: str
    time: str
    amount: str
    in_use: tuple[int, int] | None = None
    """Of a purchase: the years [start, end) over which it is written off."""


def write_workbook(scenario: Scenario, path: Path) -> None:
    """At the median of every input, in USD."""
    book = Workbook()
    summary = book.active
    summary.title = "summary"
    ref = _write_inputs(book.create_sheet("inputs"), scenario)
    totals = []
    for i, fleet in enumerate(scenario.file.fleets, start=1):
        sheet = book.create_sheet(f"fleet{i}")
        totals.append(_write_ledger(sheet, scenario, fleet, ref))
    _write_summary(summary, scenario, totals)
    for sheet in book.worksheets:
        sheet.column_dimensions["A"].width = 46
        for letter in "BCDEFG":
            sheet.column_dimensions[letter].width = 18
    book.save(path)


def _text(given: str) -> str:
    """As text whatever it starts with or holds: names and sources are the user's, and only ours are formulas."""
    clean = ILLEGAL_CHARACTERS_RE.sub("?", given)
    return f"'{clean}" if clean.startswith("=") else clean


def _head(sheet: Worksheet, *titles: str) -> None:
    sheet.append([_text(title) for title in titles])
    for cell in sheet[1]:
        cell.font = BOLD
    sheet.freeze_panes = "B2"


def _write_inputs(sheet: Worksheet, scenario: Scenario) -> Ref:
    """Value, distribution, source and date of every input; counts of GPUs too."""
    _head(sheet, "input", "value (median)", "as given", "date", "source")
    cells = {}
    for name, q in scenario.quantities.items():
        sheet.append([_text(name), q.central, str(q), _text(q.date), _text(q.source)])
        cells[name] = f"inputs!$B${sheet.max_row}"
    for fleet in scenario.file.fleets:
        for i, group in enumerate(fleet.groups):
            name = _count_name(fleet, i)
            sheet.append([_text(name), group.count, group.gpu, "", "the scenario"])
            cells[name] = f"inputs!$B${sheet.max_row}"

    def ref(path: str) -> str:
        return cells.get(path, "0")

    return ref


def _count_name(fleet: FleetFields, group: int) -> str:
    return f"fleets.{fleet.name}.groups[{group}].count"


def _write_ledger(sheet: Worksheet, scenario: Scenario, fleet: FleetFields, ref: Ref) -> dict[str, str]:
    """Capacity by year, payments, tokens by year, totals; returns where the totals are."""
    _head(
        sheet,
        *("payment", "level", "time, years", "USD", "discount factor", "present value, USD"),
        "its tax, present value, USD",
    )
    wacc, rate = ref("finance.wacc_ratio"), ref("finance.tax_ratio")
    years = scenario.file.finance.horizon_years
    for y in range(1, years + 1):
        row = sheet.max_row + 1
        capacity = f"={_capacity(scenario, fleet, y, ref)}"
        label, factor = f"capacity in tokens a second, year {y}", f"=(1+{wacc})^-C{row}"
        sheet.append([label, "capacity", f"={_time(scenario, y)}", capacity, factor])
    payments = [p for i in range(len(fleet.groups)) for p in _group_payments(scenario, fleet, i, ref)]
    payments += _fleet_payments(scenario, fleet, ref)
    payments += _revenue(scenario, ref)
    for p in payments:
        row = sheet.max_row + 1
        cells = [_text(p.label), p.level, f"={p.time}", f"={p.amount}", f"=(1+{wacc})^-C{row}"]
        sheet.append([*cells, f"=D{row}*E{row}", f"=-D{row}*{rate}*{_tax_factor(p, row)}"])
    last = sheet.max_row
    for y in range(1, years + 1):
        row = sheet.max_row + 1
        cells = [
            f"output tokens, year {y}",
            "tokens",
            f"={_time(scenario, y)}",
            f"={_tokens(scenario, y, ref)}",
        ]
        sheet.append([*cells, f"=(1+{wacc})^-C{row}", f"=D{row}*E{row}"])
    first_token = last + 1
    levels, values, taxes = (f"${x}${FIRST_ROW}:${x}${last}" for x in "BFG")
    name = sheet.title
    totals = {}

    def total(key: str, label: str, formula: str) -> None:
        sheet.append([label, "", "", "", "", f"={formula}"])
        sheet.cell(sheet.max_row, 1).font = BOLD
        totals[key] = f"{name}!$F${sheet.max_row}"

    total("chip_usd", "chips", f'SUMIF({levels},"chip",{values})')
    total(
        "system_usd", "systems (CapEx)", f'SUMIF({levels},"chip",{values})+SUMIF({levels},"system",{values})'
    )
    revenue = f'SUMIF({levels},"revenue",{values})+SUMIF({levels},"revenue",{taxes})'
    total("npv_usd", "TCO (NPV)", f"SUM({values})+SUM({taxes})-({revenue})")
    tokens = f"{first_token}:F{first_token + years - 1}"
    discounts = f"SUM(E{first_token}:E{first_token + years - 1})"
    total("annualised_usd", "TCO a year", f"{totals['npv_usd']}/{discounts}")
    total(
        "usd_per_million_output_tokens",
        "per million output tokens",
        f"{totals['npv_usd']}/SUM(F{tokens})/(1-{rate})*{MEGA:.0f}",
    )
    total("revenue_usd", "revenue", f"-({revenue})")
    total("profit_usd", "revenue less TCO", f"{totals['revenue_usd']}-{totals['npv_usd']}")
    return totals


def _tax_factor(p: Payment, row: int) -> str:
    """As `lines.after_tax`: when tax is saved on a payment; on a purchase evenly over its years in use."""
    if p.in_use is None:
        return f"E{row}"
    start, end = p.in_use
    factors = f"$E${FIRST_ROW + start}:$E${FIRST_ROW + end - 1}"
    return f"SUM({factors})/{end - start}"


def _time(scenario: Scenario, year: int) -> str:
    return repr(year - 0.5 if scenario.file.finance.flows == "mid-year" else float(year))


def _years(scenario: Scenario, group: GroupFields) -> tuple[int, int]:
    return group.years or (0, scenario.file.finance.horizon_years)


def _lead(group: GroupFields, ref: Ref) -> str:
    return f"{ref(f'gpus.{group.gpu}.lead_time_weeks')}/{WEEKS_PER_YEAR!r}" if group.terms == "buy" else "0"


def _live(scenario: Scenario, group: GroupFields, year: int, ref: Ref) -> str:
    start, end = _years(scenario, group)
    return f"MAX(0,MIN(1,MIN({year},{end})-MAX({year - 1},{start}+{_lead(group, ref)})))"


def _missing(scenario: Scenario, group: GroupFields, year: int, ref: Ref) -> str:
    start, end = _years(scenario, group)
    return f"MAX(0,MIN(1,MIN({year},MIN({start}+{_lead(group, ref)},{end}))-MAX({year - 1},{start})))"


def _discounted(scenario: Scenario, group: GroupFields, name: str, on: str, ref: Ref) -> str:
    at = f"gpus.{group.gpu}"
    listed = ref(f"{at}.{name}")
    price = listed
    for d in scenario.file.gpus[group.gpu].discounts:
        if d.applies_to == on:
            base = listed if d.base == "list" else f"({price})"
            price = f"({price})-{base}*{ref(f'{at}.discounts.{d.name}.ratio')}"
    return f"({price})"


def _group_payments(scenario: Scenario, fleet: FleetFields, index: int, ref: Ref) -> list[Payment]:
    """As `lines.group_lines`."""
    group, file = fleet.groups[index], scenario.file
    at, name = f"gpus.{group.gpu}", f"groups[{index}], {group.gpu}"
    num, live = ref(_count_name(fleet, index)), range(1, file.finance.horizon_years + 1)
    start, end = _years(scenario, group)

    def get(field: str) -> str:
        return ref(f"{at}.{field}")

    credit = f"IF({get('uptime_ratio')}<{get('promised_uptime_ratio')},{get('sla_credit_ratio')},0)"
    rise = {y: f"(1+{ref('finance.inflation_ratio')})^{_time(scenario, y)}" for y in live}

    def yearly(label: str, amount: str, rises: bool = True) -> list[Payment]:
        return [
            Payment(
                f"{name}: {label}, year {y}",
                "running",
                _time(scenario, y),
                f"{amount}*{_live(scenario, group, y, ref)}" + (f"*{rise[y]}" if rises else ""),
            )
            for y in live
        ]

    if group.terms != "buy":
        rent = "on_demand_usd_per_h" if group.terms == "on-demand" else "reserved_usd_per_h"
        usd_per_h = _discounted(scenario, group, rent, group.terms, ref)
        full = f"{num}*{usd_per_h}*{HOURS_PER_YEAR}*(1-{credit})"
        if group.terms == "reserved":
            return yearly("rent", full, rises=False)
        return [
            Payment(
                f"{name}: rent, year {y}",
                "running",
                _time(scenario, y),
                f"{full}*{_live(scenario, group, y, ref)}*{_used(scenario, y, ref)}",
            )
            for y in live
        ]

    price, lead = _discounted(scenario, group, "price_usd", "price", ref), _lead(group, ref)
    hardware = f"{num}*({price}+{get('server_usd')})"

    def once(label: str, level: str, amount: str) -> list[Payment]:
        deposit = get("deposit_ratio")
        return [
            Payment(f"{name}: {label}, deposit", level, f"{start}", f"({amount})*{deposit}", (start, end)),
            Payment(
                f"{name}: {label}, on delivery",
                level,
                f"{start}+{lead}",
                f"({amount})*(1-{deposit})",
                (start, end),
            ),
        ]

    draw_w = f"{num}*({get('tdp_w')}*{get('draw_ratio')}*(1-{get('power_cut_ratio')})+{get('server_w')})"
    most_w = f"{num}*({get('tdp_w')}+{get('server_w')})"
    payments = once("chips", "chip", f"{num}*{price}") + once(
        "servers", "system", f"{num}*{get('server_usd')}"
    )
    for label in SURCHARGES:
        payments += once(label, "system", f"{hardware}*{ref(f'site.{label}_ratio')}")
    if file.site.own:
        kwh = f"{draw_w}/{KILO:.0f}*{ref('site.own.pue_ratio')}*{HOURS_PER_YEAR}"
        payments += yearly("power", f"{kwh}*{ref('site.own.usd_per_kwh')}")
        payments += once(
            "cooling plant", "system", f"{most_w}/{KILO:.0f}*{ref('site.own.cooling_usd_per_kw')}"
        )
    else:
        contract = f"{ref('site.colocation.usd_per_kw_month')}*{MONTHS_PER_YEAR}"
        payments += yearly("colocation", f"{most_w}/{KILO:.0f}*{contract}")
        metered = f"{draw_w}/{KILO:.0f}*{HOURS_PER_YEAR}*{ref('site.colocation.usd_per_kwh')}"
        payments += yearly("metered energy", metered)
    payments += yearly("support", f"{hardware}*{get('support_ratio')}*(1-{credit})")
    payments += yearly("failures", f"{num}*{price}*{get('failure_ratio')}")
    payments += yearly("insurance", f"{hardware}*{ref('site.insurance_ratio')}")
    successor = file.gpus[group.gpu].successor_year
    drop = get("successor_drop_ratio") if successor is not None and successor <= end else "0"
    residual = f"{get('residual_3y_ratio')}^(({end - start}-{lead})/3)*(1-{drop})"
    return [*payments, Payment(f"{name}: resale", "resale", f"{end}", f"-({hardware}*{residual})")]


def _fleet_payments(scenario: Scenario, fleet: FleetFields, ref: Ref) -> list[Payment]:
    """As `lines.fleet_lines`."""
    at = f"fleets.{fleet.name}"
    horizon = (0, scenario.file.finance.horizon_years)
    payments = [Payment("qualify a second stack", "system", "0", ref(f"{at}.qualification_usd"), horizon)]
    bought = [(i, g) for i, g in enumerate(fleet.groups) if g.terms == "buy"]
    for y in range(1, scenario.file.finance.horizon_years + 1):
        time = _time(scenario, y)
        rise = f"(1+{ref('finance.inflation_ratio')})^{time}"
        stack = f"{ref(f'{at}.stack_usd_per_year')}*{rise}"
        payments.append(Payment(f"second software stack, year {y}", "running", time, stack))
        if bought:
            missing = [_missing(scenario, g, y, ref) for _, g in bought]
            gpus = "+".join(
                f"{ref(_count_name(fleet, i))}*{m}" for (i, _), m in zip(bought, missing, strict=True)
            )
            cloud = (
                f"({gpus})*{HOURS_PER_YEAR}*{ref('waiting.cloud_usd_per_h')}*{ref('waiting.bridged_ratio')}"
            )
            idle = f"MAX({','.join(missing)})*{ref('waiting.idle_usd_per_year')}"
            payments.append(Payment(f"cloud while waiting, year {y}", "running", time, cloud))
            payments.append(Payment(f"people while waiting, year {y}", "running", time, idle))
    return payments


def _capacity(scenario: Scenario, fleet: FleetFields, year: int, ref: Ref) -> str:
    """As `fleet.capacity_tokens_per_s`."""
    parts = []
    planned = ref(plan_rate_path(fleet.name)) if fleet.plan else None
    for i, g in enumerate(fleet.groups):
        at = f"gpus.{g.gpu}"
        here = f"({_live(scenario, g, year, ref)}+{_missing(scenario, g, year, ref)}*{ref('waiting.bridged_ratio')})"
        full = planned or ref(f"{at}.output_tokens_per_s")
        rate = f"{full}*{ref(f'{at}.uptime_ratio')}*(1-{ref(f'{at}.throughput_cost_ratio')})"
        parts.append(f"{ref(_count_name(fleet, i))}*{rate}*{here}")
    return f"({'+'.join(parts)})*{ref(f'fleets.{fleet.name}.throughput_ratio')}"


def _capacity_cell(year: int) -> str:
    """On the fleet's own sheet, above the payments."""
    return f"$D${FIRST_ROW + year - 1}"


def _used(scenario: Scenario, year: int, ref: Ref) -> str:
    """As `fleet.used_ratio`."""
    utilisation = ref("workload.utilisation_ratio")
    if scenario.file.workload.demand_output_tokens_per_s is None:
        return utilisation
    capacity = _capacity_cell(year)
    demand = ref("workload.demand_output_tokens_per_s")
    return f"IF({capacity}=0,{utilisation},MIN({utilisation},{demand}/{capacity}))"


def _tokens(scenario: Scenario, year: int, ref: Ref) -> str:
    """min(demand, capacity x utilisation) x seconds."""
    served = f"{_capacity_cell(year)}*{ref('workload.utilisation_ratio')}"
    if scenario.file.workload.demand_output_tokens_per_s is not None:
        served = f"MIN({ref('workload.demand_output_tokens_per_s')},{served})"
    return f"{served}*{S_PER_YEAR}"


def _revenue(scenario: Scenario, ref: Ref) -> list[Payment]:
    price = ref("workload.revenue_usd_per_million_output_tokens")
    return [
        Payment(
            f"revenue, year {y}",
            "revenue",
            _time(scenario, y),
            f"-({_tokens(scenario, y, ref)})/{MEGA:.0f}*{price}",
        )
        for y in range(1, scenario.file.finance.horizon_years + 1)
    ]


def _write_summary(sheet: Worksheet, scenario: Scenario, totals: list[dict[str, str]]) -> None:
    """Fleets side by side, then what each saves against the first."""
    names = [fleet.name for fleet in scenario.file.fleets]
    _head(sheet, "USD, median inputs", *names)
    for key in totals[0]:
        sheet.append([key, *(f"={t[key]}" for t in totals)])
    for key in (key for key in totals[0] if key not in ("revenue_usd", "profit_usd")):
        first = totals[0][key]
        sheet.append([f"saving: {key}", *(f'=IF({first}=0,"",1-{t[key]}/{first})' for t in totals)])
    rates = (scenario.file.finance.flows, scenario.file.finance.terms)
    sheet.append(
        [
            _text(
                f"{scenario.file.name}: cash only, {rates[0]} running costs, {rates[1]}; change column B of inputs"
            )
        ]
    )
