"""Every policy on the same trace, simulated: hit rate, speed and transfers; which part of seqmoe brings what; settings.

python bench/bench_policies.py --traces routing.npz --predictor DIR --sequences 288:321 --grid-sequences 256:288 --plot policies.png

Three parts. policies: all that the data allows. ladder: from LRU to seqmoe, one part more on every rung. grid: k', c and
lambda. Slots bound with the jobs are simulated by the reference only, which is slow: those rows and their neighbours are on
the first --early-sequences, in tables of their own. The plot's first panel is the paper's figure 7, the second its figure 3.
"""

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from sim_common import (
    Lab,
    check_outputs,
    figures,
    finish,
    gains,
    markdown,
    numbers_of,
    open_lab,
    points,
    shares_of,
    simulation_options,
)

from seqmoe.autotune.simulate_plan import Outcome
from seqmoe.profiles.cliutil import Command, require
from seqmoe.profiles.errors import UsageError
from seqmoe.runtime.policy import POLICIES, Changes, Plan

PARTS = ("policies", "ladder", "grid")
EARLY = "seqmoe-early-binding"
EVICTIONS = (
    "lru",
    "lfu",
    "prefill-hot",
    "belady-8",
    "belady",
    "belady-f8",
    "seqmoe-cache-only",
)  # the paper's figure 3
SYSTEMS = (
    "lru", "lfu", "prefill-hot", "moe-infinity", "promoe", "seqmoe-cache-only", "seqmoe-infinity-order", "seqmoe",
)  # fmt: skip
COLUMNS = ("hit_rate", "speed_of_full", "transfers", "useful", "late", "wasted")
Row = dict[str, Any]


def run_policies(lab: Lab, ratio: float, shares: list[float], names: list[str]) -> tuple[list[Row], dict[str, str]]:
    """A row for each policy and residency, and why policies were left out."""
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    for name in names:
        plan = lab.bench.plan(name, Changes(), ratio)
        try:
            for share in shares:
                rows.append({"policy": name, "residency": share, **figures(lab.run(name, plan, ratio, share))})
        except UsageError as error:
            left_out[name] = str(error)
    return rows, left_out


@dataclass(frozen=True)
class Rung:
    """One plan of the ladder."""

    name: str
    plan: Plan
    token: bool = False  # whether forecasts know the token that is fed


def ladder(top_k: int, num_experts: int) -> list[Rung]:
    """From LRU to seqmoe and beyond its c. The paper binds slots early, and makes k + 3 jobs a layer for one step."""
    cache = Plan("expected", k_prime=min(top_k + 3, num_experts), horizon=1, after=False)
    early = replace(cache, order="joint", early_binding=True)
    late = replace(early, early_binding=False)
    admitted = replace(late, admission=True)
    second = replace(admitted, job_steps=2)
    own = POLICIES["seqmoe"].plan
    assert own is not None
    more = replace(second, k_prime=min(own.k_prime, num_experts))
    return [
        Rung("LRU", Plan("lru")),
        Rung("cache by forecast, one step (c = 1)", cache),
        Rung("+ prefetch, slots bound early (paper)", early),
        Rung("+ slots bound when a transfer starts", late),
        Rung("+ admission", admitted),
        Rung("+ the fed token", admitted, True),
        Rung("+ jobs for a second step", second, True),
        Rung(f"+ k' = {more.k_prime}", more, True),
        *(Rung(f"+ recursion, c = {c}", replace(more, horizon=c), True) for c in (2, 4, 8)),
        Rung("+ a forecast after the last layer too", replace(more, horizon=8, after=True), True),
    ]


def climb(lab: Lab, blind: Lab, rungs: list[Rung], ratio: float, shares: list[float]) -> list[Row]:
    """A row for each rung and residency, with what it gains over the rung before."""
    rows: list[Row] = []
    before: dict[float, Outcome] = {}
    for rung in rungs:
        for share in shares:
            where = lab if rung.token or not rung.plan.uses_forecast else blind
            outcome = where.run("seqmoe" if rung.plan.uses_forecast else "lru", rung.plan, ratio, share)
            row: Row = {"rung": rung.name, "residency": share, **figures(outcome)}
            if share in before:
                row["gain"] = gains(outcome, before[share])
            before[share] = outcome
            rows.append(row)
    return rows


def run_grid(
    lab: Lab, ratio: float, shares: list[float], k_primes: list[int], horizons: list[int], discounts: list[float]
) -> list[Row]:
    """A row for each setting and residency."""
    base = POLICIES["seqmoe"].plan
    assert base is not None
    rows = []
    for k_prime, horizon, discount in itertools.product(k_primes, horizons, discounts):
        plan = replace(
            base, k_prime=min(k_prime, lab.trace.num_experts), horizon=horizon, discount=discount, restraint=False
        )
        for share in shares:
            outcome = lab.run("seqmoe", plan, ratio, share)
            setting = {"k_prime": k_prime, "horizon": horizon, "discount": discount}
            rows.append({**setting, "residency": share, **figures(outcome)})
    return rows


def best_settings(rows: list[Row], count: int) -> list[tuple[tuple[int, int, float], list[Row]]]:
    """The settings with the highest hit rate, on average over the residencies, and their rows."""
    settings: dict[tuple[int, int, float], list[Row]] = {}
    for row in rows:
        settings.setdefault((row["k_prime"], row["horizon"], row["discount"]), []).append(row)
    ranked = sorted(settings.items(), key=lambda item: -sum(row["hit_rate"] for row in item[1]))
    return ranked[:count]


def policies_table(rows: list[Row]) -> str:
    """A line for each policy: its figures at every residency."""
    shares = list(dict.fromkeys(row["residency"] for row in rows))
    columns = ["policy", *(f"hit {share:.0%}" for share in shares), *(f"speed {share:.0%}" for share in shares)]
    columns += ["moved", "useful", "late", "wasted"]
    lines = []
    for name in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == name]
        line = [
            f"`{name}`",
            *(f"{row['hit_rate']:.4f}" for row in own),
            *(f"{row['speed_of_full']:.3f}" for row in own),
        ]
        lines.append(line + [" / ".join(f"{row[key]:.1f}" for row in own) for key in COLUMNS[2:]])
    return markdown(columns, lines)


def ladder_table(rows: list[Row]) -> str:
    """A line for each rung: hit rate, what it gained, and speed at every residency."""
    shares = list(dict.fromkeys(row["residency"] for row in rows))
    columns = ["rung", *(f"hit {s:.0%}" for s in shares), *(f"gained {s:.0%}" for s in shares), "speed"]
    lines = []
    for name in dict.fromkeys(row["rung"] for row in rows):
        own = [row for row in rows if row["rung"] == name]
        gained = [points(row["gain"]["hit_rate"]) if "gain" in row else "" for row in own]
        speed = " / ".join(f"{row['speed_of_full']:.3f}" for row in own)
        lines.append([name, *(f"{row['hit_rate']:.4f}" for row in own), *gained, speed])
    return markdown(columns, lines)


def grid_table(rows: list[Row], count: int) -> str:
    """The best settings, then the policy's own."""
    own = POLICIES["seqmoe"].plan
    assert own is not None
    shares = list(dict.fromkeys(row["residency"] for row in rows))
    ranked = best_settings(rows, len(rows))
    kept = ranked[:count] + [one for one in ranked[count:] if one[0] == (own.k_prime, own.horizon, own.discount)]
    columns = ["k'", "c", "lambda", *(f"hit {s:.0%}" for s in shares), *(f"speed {s:.0%}" for s in shares)]
    lines = []
    for (k_prime, horizon, discount), found in kept:
        line = [str(k_prime), str(horizon), f"{discount:g}"]
        line += [f"{row['hit_rate']:.4f}" for row in found] + [f"{row['speed_of_full']:.3f}" for row in found]
        lines.append(line)
    return markdown(columns, lines)


def plot_policies(rows: list[Row], path: Path) -> None:
    """Hit rate by residency: systems, and evictions without prefetch."""
    from seqmoe.predictors.plots import look, new_figure

    figure, panels = new_figure(2)
    for axes, names, title in zip(panels, (SYSTEMS, EVICTIONS), ("systems", "evictions without prefetch"), strict=True):
        for place, name in enumerate(names):
            own = sorted((row for row in rows if row["policy"] == name), key=lambda row: row["residency"])
            if own:
                x, y = [100 * row["residency"] for row in own], [100 * row["hit_rate"] for row in own]
                style: dict[str, Any] = {**look(place), "markersize": 5, "linewidth": 1.5}
                axes.plot(x, y, label=name, **style)
        axes.set_xlabel("residency (% of the experts)")
        axes.set_ylabel("hit rate (%)")
        axes.set_title(title, fontsize=10)
        axes.legend(frameon=False, fontsize=7)
    figure.savefig(path, format="png")


@click.command(cls=Command, help=__doc__)
@simulation_options
@click.option("--link-ratio", type=float, default=0.72, show_default=True, help="Transfer / compute of a layer.")
@click.option("--parts", default=",".join(PARTS), show_default=True, help="Which of the three.")
@click.option("--policies", help="Only these. [default: all]")
@click.option(
    "--without-token", help="Predictor of the rungs without token. [default: --predictor, not told the token]"
)
@click.option("--early-sequences", type=click.IntRange(2), default=3, show_default=True, help="For early binding.")
@click.option("--grid-sequences", help="Sequences to choose settings on. [default: --sequences]")
@click.option("--k-primes", default="7,10,12,16", show_default=True)
@click.option("--horizons", default="1,2,4,8", show_default=True)
@click.option("--lambdas", default="0.3,0.5,0.8", show_default=True)
def main(
    traces: Path,
    predictor: str,
    sequences: str,
    fit_sequences: str | None,
    calibrate_sequences: str | None,
    residency: str,
    link_ratio: float,
    parts: str,
    policies: str | None,
    without_token: str | None,
    early_sequences: int,
    grid_sequences: str | None,
    k_primes: str,
    horizons: str,
    lambdas: str,
    out: Path | None,
    plot: Path | None,
    as_json: bool,
) -> int:
    check_outputs(out, plot)
    wanted = [part.strip() for part in parts.split(",")]
    require(set(wanted) <= set(PARTS), f"--parts takes {', '.join(PARTS)}; got {parts!r}")
    lab = open_lab(traces, predictor, sequences, fit_sequences, calibrate_sequences)
    shares = shares_of(residency, lab)
    few = lab.first(early_sequences)
    report: dict[str, Any] = {
        "traces": str(traces), "predictor": predictor, "sequences": sequences, "steps": lab.trace.num_steps,
        "link_ratio": link_ratio,
    }  # fmt: skip
    title = f"{lab.trace.num_sequences} sequences, {lab.trace.num_steps} steps, link ratio {link_ratio:g}"
    title_few = f"the first {few.trace.num_sequences} sequences, {few.trace.num_steps} steps"
    if "policies" in wanted:
        names = [name.strip() for name in policies.split(",")] if policies else list(POLICIES)
        rows, left_out = run_policies(lab, link_ratio, shares, [name for name in names if name != EARLY])
        report |= {"policies": rows, "left_out": left_out}
        print(f"\n{title}\n\n{policies_table(rows)}\n\nmoved, useful, late, wasted: records a step", flush=True)
        for name, reason in left_out.items():
            print(f"left out: {name}: {reason}")
        if plot:
            plot_policies(rows, plot)
        if EARLY in names:
            rows, _ = run_policies(few, link_ratio, shares, ["seqmoe", EARLY])
            report["early_binding"] = rows
            print(f"\n{title_few}\n\n{policies_table(rows)}", flush=True)
    if "ladder" in wanted:
        rungs = ladder(lab.trace.top_k, lab.trace.num_experts)
        whole = [rung for rung in rungs if not rung.plan.early_binding]
        rows = report["ladder"] = climb(lab, lab.blind(without_token), whole, link_ratio, shares)
        print(f"\n{title}\n\n{ladder_table(rows)}", flush=True)
        rows = report["binding"] = climb(few, few.blind(without_token), rungs[1:5], link_ratio, shares)
        print(f"\n{title_few}\n\n{ladder_table(rows)}", flush=True)
    if "grid" in wanted:
        where = lab
        if grid_sequences:
            where = open_lab(traces, predictor, grid_sequences, fit_sequences, calibrate_sequences)
        k_list = [int(number) for number in numbers_of(k_primes, "--k-primes")]
        c_list = [int(number) for number in numbers_of(horizons, "--horizons")]
        rows = report["grid"] = run_grid(where, link_ratio, shares, k_list, c_list, numbers_of(lambdas, "--lambdas"))
        print(
            f"\n{where.trace.num_sequences} sequences of {grid_sequences or sequences}\n\n{grid_table(rows, 8)}",
            flush=True,
        )
    finish(report, out, as_json)
    return 0


if __name__ == "__main__":
    main()
