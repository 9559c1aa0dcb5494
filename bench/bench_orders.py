"""Joint scheduling against the orders of others, simulated: differences paired by sequence, with 95% intervals.

python bench/bench_orders.py --traces routing.npz --predictor DIR --sequences 288:321 --plot orders.png

Two settings: "ours" is the policies as they are, "paper" makes fewer jobs (k' = k + 3, of one step, c = 8). Self-restraint
is off, so that the orders alone are compared; --restraint leaves it on. Points of a hundred; a difference is above or below
where its interval does not hold 0.
"""

from dataclasses import replace
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
    side,
    simulation_options,
)

from seqmoe.autotune.simulate_plan import Outcome
from seqmoe.profiles.cliutil import Command, require
from seqmoe.runtime.policy import Changes, Plan

JOINT = "seqmoe"
RIVALS = ("seqmoe-infinity-order", "seqmoe-promoe-order", "seqmoe-first-come")
SETTINGS = ("ours", "paper")
SHORT = {"hit_rate": "hit rate", "speed_of_full": "speed"}


def plan_of(lab: Lab, name: str, setting: str, restraint: bool) -> Plan:
    """A policy's plan in a setting."""
    plan = lab.bench.plan(name, Changes(), 1.0)
    assert plan is not None
    if setting == "paper":
        plan = replace(plan, k_prime=min(lab.trace.top_k + 3, lab.trace.num_experts), job_steps=1, horizon=8)
    return replace(plan, restraint=restraint)


def compare(lab: Lab, setting: str, ratios: list[float], shares: list[float], restraint: bool) -> list[dict[str, Any]]:
    """A row for each ratio and residency: figures of every order, and what joint scheduling gains over the others."""
    rows = []
    for ratio in ratios:
        for share in shares:
            outcomes: dict[str, Outcome] = {
                name: lab.run(name, plan_of(lab, name, setting, restraint), ratio, share) for name in (JOINT, *RIVALS)
            }
            against = {name: gains(outcomes[JOINT], outcomes[name]) for name in RIVALS}
            orders = {name: figures(outcome) for name, outcome in outcomes.items()}
            rows.append(
                {"setting": setting, "link_ratio": ratio, "residency": share, "orders": orders, "against": against}
            )
    return rows


def verdict(rows: list[dict[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """For every rival: the places at which joint scheduling is above it, below it, or even."""
    found: dict[str, dict[str, list[str]]] = {name: {"above": [], "even": [], "below": []} for name in RIVALS}
    for row in rows:
        for name, measures in row["against"].items():
            for measure, gain in measures.items():
                place = f"{row['setting']}, ratio {row['link_ratio']:g}, {row['residency']:.0%}, {SHORT[measure]}"
                found[name][side(gain)].append(place)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each ratio and residency."""
    columns = ["link ratio", "resident", "joint: hit rate", "speed"]
    infinity, promoe, first_come = RIVALS
    shown = [infinity, promoe]
    if any(row["against"][first_come] != row["against"][promoe] for row in rows):
        shown.append(first_come)  # all jobs are queued at once, by deadline: usually the same
    columns += [f"{SHORT[measure]} over {_short(name)}" for name in shown for measure in SHORT]
    lines = []
    for row in rows:
        own = row["orders"][JOINT]
        line = [
            f"{row['link_ratio']:g}",
            f"{row['residency']:.0%}",
            f"{own['hit_rate']:.4f}",
            f"{own['speed_of_full']:.4f}",
        ]
        lines.append(line + [points(row["against"][name][measure]) for name in shown for measure in SHORT])
    return markdown(columns, lines)


def _short(name: str) -> str:
    return name.removeprefix("seqmoe-").removesuffix("-order")


def plot_orders(rows: list[dict[str, Any]], path: Path) -> None:
    """Gains over two rivals by link ratio; a panel for each setting and measure, a marker for each residency."""
    from seqmoe.predictors.plots import COLOURS, LINES, MARKERS, new_figure

    settings = list(dict.fromkeys(row["setting"] for row in rows))
    shares = sorted({row["residency"] for row in rows})
    figure, panels = new_figure(2 * len(settings))
    for axes, (setting, measure) in zip(panels, [(s, m) for s in settings for m in SHORT], strict=True):
        for colour, name in enumerate(RIVALS[:2]):
            for place, share in enumerate(shares):
                own = [row for row in rows if row["setting"] == setting and row["residency"] == share]
                gain = [row["against"][name][measure] for row in own]
                # a little apart, so that the bars do not hide one another
                x = [row["link_ratio"] * (1 + 0.03 * (place - 1 + 3 * colour)) for row in own]
                bars = [[100 * (g["mean"] - g["low"]) for g in gain], [100 * (g["high"] - g["mean"]) for g in gain]]
                axes.errorbar(
                    x, [100 * g["mean"] for g in gain], yerr=bars, color=COLOURS[colour], marker=MARKERS[place % len(MARKERS)],
                    linestyle=LINES[place % len(LINES)], markersize=4, linewidth=1.2, capsize=2,
                    label=f"over {_short(name)}, {share:.0%}",
                )  # fmt: skip
        axes.axhline(0, color="0.4", linewidth=0.8)
        axes.set_xscale("log")
        ticks = sorted({row["link_ratio"] for row in rows})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("link ratio (transfer / layer)")
        axes.set_ylabel(f"{SHORT[measure]}: points gained")
        axes.set_title(f"{setting}: {SHORT[measure]}", fontsize=10)
    panels[0].legend(frameon=False, fontsize=7)
    figure.savefig(path, format="png")


@click.command(cls=Command, help=__doc__)
@simulation_options
@click.option("--link-ratios", default="0.36,0.72,1.67,3.3", show_default=True, help="Transfer / compute of a layer.")
@click.option("--settings", default=",".join(SETTINGS), show_default=True, help="Which of the two.")
@click.option("--restraint", is_flag=True, help="Leave self-restraint on.")
def main(
    traces: Path,
    predictor: str,
    sequences: str,
    fit_sequences: str | None,
    calibrate_sequences: str | None,
    residency: str,
    link_ratios: str,
    settings: str,
    restraint: bool,
    out: Path | None,
    plot: Path | None,
    as_json: bool,
) -> int:
    check_outputs(out, plot)
    wanted = [setting.strip() for setting in settings.split(",")]
    require(set(wanted) <= set(SETTINGS), f"--settings takes {', '.join(SETTINGS)}; got {settings!r}")
    ratios = numbers_of(link_ratios, "--link-ratios")
    lab = open_lab(traces, predictor, sequences, fit_sequences, calibrate_sequences)
    shares = shares_of(residency, lab)
    rows = []
    for setting in wanted:
        own = compare(lab, setting, ratios, shares, restraint)
        example = plan_of(lab, JOINT, setting, restraint)
        print(
            f"\n{setting}: k' {example.k_prime}, jobs of {example.job_steps} steps, c {example.horizon}, lambda "
            f"{example.discount:g}, restraint {'on' if restraint else 'off'}; {lab.trace.num_sequences} sequences, "
            f"{lab.trace.num_steps} steps\n\n{table(own)}\n",
            flush=True,
        )
        rows += own
    judged = verdict(rows)
    for name, places in judged.items():
        counts = ", ".join(f"{side} {len(where)}" for side, where in places.items())
        below = f": below at {'; '.join(places['below'])}" if places["below"] else ""
        print(f"joint against {_short(name)}: {counts}{below}")
    if plot:
        plot_orders(rows, plot)
    facts = {"traces": str(traces), "predictor": predictor, "sequences": sequences, "steps": lab.trace.num_steps}
    finish({**facts, "restraint": restraint, "rows": rows, "verdict": judged}, out, as_json)
    return 0


if __name__ == "__main__":
    main()
