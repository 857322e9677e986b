"""A second, independent reckoning of a scenario of fixed values, in plain Python: what the tests hold the library to.

Written from docs/economics.md, not from the library's code: one loop over years and groups, floats only.
"""

import random

HOURS = 8760
WEEKS = 365 / 7
GPUS = ("H100", "MI300X", "B200")


def reckon(scenario):
    """Per fleet: chips, systems, TCO, TCO a year, $ per million output tokens, present revenue, tokens by year."""
    finance, site, work = scenario["finance"], scenario["site"], scenario["workload"]
    years, wacc = finance["horizon_years"], finance["wacc_ratio"]
    tax, inflation = finance.get("tax_ratio", 0), finance.get("inflation_ratio", 0)
    when = [y + (0.5 if finance.get("flows") == "mid-year" else 1) for y in range(years)]
    demand = work.get("demand_output_tokens_per_s", float("inf"))
    waiting = scenario.get("waiting", {})
    surcharges = sum(site.get(f"{name}_ratio", 0) for name in ("network", "installation", "duty", "vat"))

    def fleet_costs(fleet):
        paid = [(0, fleet.get("qualification_usd", 0), "system", (0, years))]
        on_demand, capacity = [], [0.0] * years
        missing_gpus, longest = [0.0] * years, [0.0] * years
        for group in fleet["groups"]:
            gpu, count, terms = scenario["gpus"][group["gpu"]], group["count"], group.get("terms", "buy")
            start, end = group.get("years", (0, years))
            lead = gpu.get("lead_time_weeks", 0) / WEEKS if terms == "buy" else 0
            uptime = gpu.get("uptime_ratio", 1)
            kept = 1 - (gpu.get("sla_credit_ratio", 0) if uptime < gpu.get("promised_uptime_ratio", 0) else 0)
            rate = count * gpu["output_tokens_per_s"] * uptime * (1 - gpu.get("throughput_cost_ratio", 0))
            price = after_discounts(gpu, "price_usd", "price")
            hardware = count * (price + gpu.get("server_usd", 0))
            most_kw = count * (gpu["tdp_w"] + gpu.get("server_w", 0)) / 1000
            gpu_w = gpu["tdp_w"] * gpu.get("draw_ratio", 1) * (1 - gpu.get("power_cut_ratio", 0))
            draw_kw = count * (gpu_w + gpu.get("server_w", 0)) / 1000
            for y in range(years):
                live = max(0, min(y + 1, end) - max(y, start + lead))
                missing = max(0, min(y + 1, start + lead) - max(y, start))
                capacity[y] += rate * (live + missing * waiting.get("bridged_ratio", 0))
                if terms == "reserved":
                    hourly = after_discounts(gpu, "reserved_usd_per_h", "reserved")
                    paid.append((when[y], count * hourly * HOURS * live * kept, "running", None))
                elif terms == "on-demand":
                    hourly = after_discounts(gpu, "on_demand_usd_per_h", "on-demand")
                    on_demand.append((y, count * hourly * HOURS * live * kept))
                else:
                    missing_gpus[y] += count * missing
                    longest[y] = max(longest[y], missing)
                    usd = hardware * gpu.get("support_ratio", 0) * kept
                    usd += count * price * gpu.get("failure_ratio", 0)
                    usd += hardware * site.get("insurance_ratio", 0)
                    if own := site.get("own"):
                        usd += draw_kw * own["pue_ratio"] * HOURS * own["usd_per_kwh"]
                    else:
                        usd += most_kw * site["colocation"]["usd_per_kw_month"] * 12
                        usd += draw_kw * HOURS * site["colocation"].get("usd_per_kwh", 0)
                    paid.append((when[y], usd * live * (1 + inflation) ** when[y], "running", None))
            if terms == "buy":
                system = count * gpu.get("server_usd", 0) + hardware * surcharges
                system += most_kw * site.get("own", {}).get("cooling_usd_per_kw", 0)
                deposit = gpu.get("deposit_ratio", 0)
                for usd, level in ((count * price, "chip"), (system, "system")):
                    paid.append((start, usd * deposit, level, (start, end)))
                    paid.append((start + lead, usd * (1 - deposit), level, (start, end)))
                launched = gpu.get("successor_year") is not None and gpu["successor_year"] <= end
                left = gpu.get("residual_3y_ratio", 0) ** ((end - start - lead) / 3)
                left *= 1 - (gpu.get("successor_drop_ratio", 0) if launched else 0)
                paid.append((end, -hardware * left, "resale", None))
        full = [c * fleet.get("throughput_ratio", 1) for c in capacity]
        used = [min(work["utilisation_ratio"], demand / f if f else float("inf")) for f in full]
        paid += [(when[y], usd * used[y], "running", None) for y, usd in on_demand]
        for y in range(years):
            risen = (1 + inflation) ** when[y]
            cloud = missing_gpus[y] * HOURS * waiting.get("cloud_usd_per_h", 0)
            usd = fleet.get("stack_usd_per_year", 0) * risen + cloud * waiting.get("bridged_ratio", 0)
            usd += longest[y] * waiting.get("idle_usd_per_year", 0)
            paid.append((when[y], usd, "running", None))
        for t, usd, level, in_use in list(paid):
            if in_use is None:
                paid.append((t, -usd * tax, level, None))
            else:
                span = range(*in_use)
                paid += [(when[y], -usd * tax / len(span), "running", None) for y in span]
        tokens = [f * u * HOURS * 3600 for f, u in zip(full, used, strict=True)]
        return paid, tokens

    def present(amounts, times):
        return sum(usd * (1 + wacc) ** -t for usd, t in zip(amounts, times, strict=True))

    found = []
    for fleet in scenario["fleets"]:
        paid, tokens = fleet_costs(fleet)
        of = {
            level: present([p[1] for p in paid if p[2] == level], [p[0] for p in paid if p[2] == level])
            for level in ("chip", "system", "running", "resale")
        }
        tco = sum(of.values())
        present_tokens = present(tokens, when)
        earned = work.get("revenue_usd_per_million_output_tokens", 0) * present_tokens / 1e6 * (1 - tax)
        found.append(
            {
                "chip_usd": of["chip"],
                "system_usd": of["chip"] + of["system"],
                "npv_usd": tco,
                "annualised_usd": tco / present([1] * years, when),
                "usd_per_million_output_tokens": tco / present_tokens * 1e6 / (1 - tax),
                "revenue_usd": earned,
                "profit_usd": earned - tco,
                "tokens": sum(tokens),
            }
        )
    return found


def after_discounts(gpu, field, on):
    listed = price = gpu[field]
    for d in (d for d in gpu.get("discounts", ()) if d["applies_to"] == on):
        price -= d["ratio"] * (listed if d["base"] == "list" else price)
    return price


def odd_scenario(seed):
    """Every field at some value that it may have, together in ways that nobody would choose."""
    r = random.Random(seed)
    years = r.randint(2, 6)

    def gpu():
        cuts = [
            {
                "name": f"d{i}",
                "ratio": r.uniform(0, 0.2),
                "applies_to": r.choice(["price", "on-demand", "reserved"]),
                "base": r.choice(["list", "remaining"]),
            }
            for i in range(r.randint(0, 4))
        ]
        return {
            "price_usd": r.uniform(5e3, 5e4),
            "on_demand_usd_per_h": r.uniform(1, 6),
            "reserved_usd_per_h": r.uniform(1, 3),
            "output_tokens_per_s": r.uniform(100, 3000),
            "server_usd": r.choice([0, r.uniform(5e3, 3e4)]),
            "server_w": r.uniform(0, 900),
            "tdp_w": r.uniform(400, 1400),
            "draw_ratio": r.uniform(0.2, 1),
            "power_cut_ratio": r.choice([0, 0.15]),
            "throughput_cost_ratio": r.choice([0, 0.05]),
            "support_ratio": r.uniform(0, 0.1),
            "failure_ratio": r.uniform(0, 0.05),
            "residual_3y_ratio": r.choice([0, 0.3, r.random()]),
            "successor_year": r.choice([0, 1.5, 3]),
            "successor_drop_ratio": r.uniform(0, 0.4),
            "lead_time_weeks": r.choice([0, r.uniform(1, 50)]),
            "deposit_ratio": r.choice([0, 0.3, 1]),
            "uptime_ratio": r.choice([1, 0.99, 0.97]),
            "promised_uptime_ratio": r.choice([0, 0.98, 0.999]),
            "sla_credit_ratio": r.uniform(0, 0.3),
            "discounts": cuts,
        }

    gpus = {name: gpu() for name in GPUS}

    def group():
        start = r.choice([0, 0, r.randint(0, years - 1)])
        terms = r.choice(["buy", "buy", "on-demand", "reserved"])
        span = [start, r.randint(start + 1, years)]
        return {"gpu": r.choice(GPUS), "count": r.randint(1, 500), "terms": terms, "years": span}

    names = ("network", "installation", "duty", "vat", "insurance")
    site = {f"{name}_ratio": r.choice([0, r.uniform(0, 0.15)]) for name in names}
    if r.random() < 0.5:
        site["own"] = {"usd_per_kwh": r.uniform(0.03, 0.3), "pue_ratio": r.uniform(1, 2)}
        site["own"]["cooling_usd_per_kw"] = r.choice([0, 2000])
    else:
        metered = {"usd_per_kwh": r.uniform(0.03, 0.2)} if r.random() < 0.5 else {}
        site["colocation"] = {
            "usd_per_kw_month": r.uniform(100, 300), "energy_included": not metered, **metered,
        }  # fmt: skip
    work = {"utilisation_ratio": r.uniform(0.2, 1)}
    if r.random() < 0.5:
        work["demand_output_tokens_per_s"] = r.uniform(500, 200_000)
    if r.random() < 0.3:
        work["revenue_usd_per_million_output_tokens"] = r.uniform(0.1, 5)
    steady = {"gpu": r.choice(GPUS), "count": 3, "terms": r.choice(["buy", "on-demand"])}
    return {
        "name": "odd",
        "finance": {
            "horizon_years": years,
            "wacc_ratio": r.choice([0, 0.08, r.uniform(0.01, 0.3)]),
            "flows": r.choice(["end-year", "mid-year"]),
            "inflation_ratio": r.choice([0, 0.03]),
            "tax_ratio": r.choice([0, 0.25]),
        },
        "site": site,
        "workload": work,
        "gpus": gpus,
        "fleets": [
            {
                "name": name,
                "groups": [*(group() for _ in range(r.randint(1, 3))), steady],
                "throughput_ratio": r.choice([1, 0.92]),
                "stack_usd_per_year": r.choice([0, 5e4]),
                "qualification_usd": r.choice([0, 1e5]),
            }
            for name in ("one", "two")
        ],
        "waiting": {
            "cloud_usd_per_h": r.uniform(1, 6),
            "bridged_ratio": r.choice([0, 0.5, 1]),
            "idle_usd_per_year": r.choice([0, 1e6]),
        },
    }
