"""`seqmoe simulate`: policies on a trace and a virtual clock, side by side."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from seqmoe.autotune.simulate_plan import Outcome, Timing
from seqmoe.autotune.simulate_policies import Workbench
from seqmoe.autotune.stats import interval
from seqmoe.predictors.trace import Trace
from seqmoe.predictors.trace_file import parse_sequences, read_trace
from seqmoe.profiles.cliutil import LINK, SIZE, Command, emit_json, json_option, require
from seqmoe.profiles.errors import UsageError
from seqmoe.profiles.files import check_output
from seqmoe.profiles.spec import LinkSpec
from seqmoe.runtime.policy import POLICIES, Changes, find_policy

_CALIBRATE = 9  # one in so many of the sequences that are not simulated is for the calibration

_NAMES = "\n".join(f"  {name:22} {policy.help}" for name, policy in POLICIES.items())
EXAMPLES = f"""\b
Examples:
  seqmoe simulate --traces routing.npz --policy lru,belady,seqmoe --residency 0.15,0.25,0.45 --link-ratio 0.72 \\
      --predictor predictor/ --sequences 288:321
  seqmoe simulate --traces routing.npz --policy seqmoe,seqmoe-infinity-order --residency 0.25 --link-ratio 1.67 \\
      --predictor nearest-token --sequences 288:321 --against seqmoe-infinity-order --json
  seqmoe simulate --traces routing.npz --policy lru,seqmoe-cache-only,seqmoe-no-restraint,seqmoe --residency 0.45 \\
      --link-ratio 0.01,0.72,30 --predictor-us 1200 --predictor predictor/ --sequences 288:321
  seqmoe simulate --traces routing.safetensors --policy previous-token,specprefetch --residency 0.25 --link-ratio 0.5 \\
      --m-max 1,2,4,8 --sequences 194:224 --fit-sequences 0:162
  seqmoe simulate --traces routing.npz --policy lru,seqmoe --residency 0.45 --layer-us 900 --record-bytes 9MiB \\
      --link dma:7GB/s,20us --predictor predictor/

\b
Policies:
{_NAMES}

\b
Rivals among the predictors are fitted to the sequences that are not simulated, but for the last ninth of those, which
calibrates them; --fit-sequences and --calibrate-sequences say otherwise. Sequences share one pool, one after another,
cold before the first.

\b
Policies seqmoe... restrain themselves: forecasts and prefetch stop where they cost more than they bring (--predictor-us,
--link-ratio), and are tried again from time to time. --no-restraint, or policy seqmoe-no-restraint, leaves them on.

\b
JSON: one row for each policy and setting under "rows", with hit_rate, speed_of_full, transfers_per_step, useful_bytes,
wasted_bytes, late_bytes; those of the first row also at the top. named_rate: share of the needed experts that their
step's forecast named; ready_recall: of those, the share that was resident or arrived in time; prefetch_on: share of
steps with prefetch; levels: [first step, level] where restraint changed it (0 no forecasts, 1 for the cache, 2 all).
"""


@click.command("simulate", cls=Command, epilog=EXAMPLES)
@click.option(
    "--traces", type=click.Path(path_type=Path), required=True, help="Trace to replay (.safetensors or .npz)."
)
@click.option("--policy", "names", required=True, help="One of those below; several with commas.")
@click.option("--residency", required=True, help="Shares of the experts that are resident, such as 0.15,0.45.")
@click.option("--link-ratio", "ratios", help="Time of one transfer / compute time of one layer; several with commas.")
@click.option("--layer-us", type=float, default=1000.0, show_default=True, help="Compute time of one layer.")
@click.option("--record-bytes", type=SIZE, default="9MiB", show_default=True, help="Size of one expert.")
@click.option("--link", type=LINK, help="In place of --link-ratio, such as dma:7GB/s,20us.")
@click.option("--predictor-us", type=float, default=0.0, show_default=True, help="Time of one forecast.")
@click.option("--predictor", help="Folder of `seqmoe train`, or a rival's name such as nearest-token.")
@click.option("--sequences", help="Only these, such as 288:321 (321 not included). [default: all]")
@click.option("--fit-sequences", help="Sequences to fit rivals on.")
@click.option("--calibrate-sequences", help="Sequences to fit the calibration on.")
@click.option("--k-prime", type=click.IntRange(1), help="Experts of each layer that become fetch jobs.")
@click.option("--job-steps", type=click.IntRange(1), help="Steps ahead that become fetch jobs.")
@click.option("--horizon", type=click.IntRange(1, 63), help="c: steps of forecast in the cache score.")
@click.option("--lambda", "discount", type=click.FloatRange(0, 1, min_open=True), help="Discount of a step.")
@click.option("--ema-alpha", type=click.FloatRange(0, 1, min_open=True), help="How fast the budget follows the link.")
@click.option(
    "--m-max", "m_maxes", help="At most so many prefetches a layer (SpecPrefetch's M_max); several with commas."
)
@click.option("--lead", type=click.IntRange(0), help="Jobs due within so many layers are dropped (1).")
@click.option("--least", type=click.FloatRange(0, 1), help="Confidence that a job must exceed (0).")
@click.option(
    "--worth", "eviction", type=click.Choice(["expected", "first-use"]), help="Cache score: the paper's, or first use."
)
@click.option("--no-restraint", is_flag=True, help="Prefetch of the seqmoe policies never stops by itself.")
@click.option("--early-binding", is_flag=True, default=None, help="Bind slots when jobs are made. Slow to simulate.")
@click.option("--against", help="Also the paired differences of all policies from this one, by sequence.")
@click.option("--plot", type=click.Path(path_type=Path), help="Write a plot to this PNG file.")
@json_option
def simulate_command(
    traces: Path,
    names: str,
    residency: str,
    ratios: str | None,
    layer_us: float,
    record_bytes: int,
    link: LinkSpec | None,
    predictor_us: float,
    predictor: str | None,
    sequences: str | None,
    fit_sequences: str | None,
    calibrate_sequences: str | None,
    k_prime: int | None,
    job_steps: int | None,
    horizon: int | None,
    discount: float | None,
    ema_alpha: float | None,
    m_maxes: str | None,
    lead: int | None,
    least: float | None,
    eviction: str | None,
    no_restraint: bool,
    early_binding: bool | None,
    against: str | None,
    plot: Path | None,
    as_json: bool,
) -> int:
    """Replay a trace under several policies on a virtual clock: hit rate and speed without the machine."""
    policies = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    require(bool(policies), f"--policy is empty; it takes {', '.join(POLICIES)}")
    for name in policies:
        find_policy(name)
    if against is not None:
        require(against in policies, f"--against {against} is not among --policy")
    if plot:
        check_output(plot)
    transfers = _transfers_us(ratios, link, layer_us, record_bytes)
    trace, training, validation = _split(traces, sequences, fit_sequences, calibrate_sequences)
    console = Console(stderr=True)
    changes = Changes(
        k_prime=k_prime, job_steps=job_steps, horizon=horizon, discount=discount, ema_alpha=ema_alpha, lead=lead,
        least=least, eviction=eviction, early_binding=early_binding, restraint=False if no_restraint else None,
    )  # fmt: skip
    budgets = _budgets(m_maxes)
    bench = Workbench(trace, training, validation, predictor)
    for name in policies:
        bench.predictor_of(name)
    slots = _slots(residency, trace)
    rows: list[dict[str, Any]] = []
    outcomes: dict[tuple[str, float, float, int | None], Outcome] = {}
    cases = [(name, transfer, share) for name in policies for transfer in transfers for share in slots]
    with console.status("simulating") as status:
        bench.progress = lambda what, done, total: status.update(f"{what} {done}/{total}" if total else what)
        for name, transfer_us, (share, count) in cases:
            timing = Timing((layer_us,) * trace.num_layers, transfer_us, predictor_us, record_bytes)
            ratio = transfer_us / layer_us
            for m_max in budgets:
                plan = bench.plan(name, replace(changes, m_max=m_max), ratio)
                has_budget = plan is not None and plan.order is not None and plan.m_max > 0
                if m_max != budgets[0] and not has_budget:
                    outcomes[name, share, ratio, m_max] = outcomes[name, share, ratio, budgets[0]]
                    continue
                status.update(f"{name} at {share:.0%}")
                outcome = outcomes[name, share, ratio, m_max] = bench.run(name, plan, timing, count)
                row = {"policy": name, "residency": share, "slots": count, "predictor": bench.predictor_of(name)}
                row |= {"link_ratio": ratio, "m_max": m_max if has_budget else None}
                rows.append({**row, **outcome.to_dict(record_bytes)})
    printer = console if as_json else Console()
    if not printer.is_terminal:
        printer = Console(width=150, stderr=as_json)
    said = ", ".join(f"{transfer / layer_us:.3g}" for transfer in transfers)
    title = f"{traces.name}: {trace.num_sequences} sequences, {trace.num_steps} steps, link ratio {said}"
    printer.print(result_table(rows, record_bytes, title))
    compared = _compare(outcomes, against) if against else []
    if compared:
        printer.print(compared_table(compared, against or ""))
    if plot:
        plot_rows(rows, title, plot)
    if as_json:
        keys = ("hit_rate", "speed_of_full", "transfers_per_step", "useful_bytes", "wasted_bytes", "late_bytes")
        settings = {"traces": str(traces), "sequences": trace.num_sequences, "steps": trace.num_steps}
        first = {key: rows[0][key] for key in ("link_ratio", *keys)}
        emit_json({**settings, **first, "rows": rows, "paired": compared})
    return 0


def _transfers_us(ratios: str | None, link: LinkSpec | None, layer_us: float, record_bytes: int) -> list[float]:
    require(layer_us > 0, f"--layer-us must be above 0, got {layer_us}")
    require((ratios is None) != (link is None), "give --link-ratio, or --link with --layer-us and --record-bytes")
    if ratios is not None:
        found = _numbers(ratios, "--link-ratio takes numbers such as 0.36,0.72")
        for ratio in found:
            require(0 < ratio < 1e6, f"--link-ratio must be above 0, got {ratio:g}")
        return [ratio * layer_us for ratio in found]
    assert link is not None
    require(link.bytes_per_s is not None, f"--link {link} has no rate; write dma:7GB/s,20us")
    assert link.bytes_per_s is not None
    return [1e6 * record_bytes / link.bytes_per_s + link.latency_us]


def _budgets(text: str | None) -> list[int | None]:
    if text is None:
        return [None]
    found = _numbers(text, "--m-max takes whole numbers such as 1,2,4")
    require(all(one >= 1 and one == int(one) for one in found), f"--m-max takes whole numbers from 1 up, got {text!r}")
    return [int(one) for one in found]


def _numbers(text: str, what: str) -> list[float]:
    """Each once. UsageError for what is no list of numbers."""
    try:
        return list(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise UsageError(f"{what}; got {text!r}") from None


def _split(
    path: Path, sequences: str | None, fit: str | None, calibrate: str | None
) -> tuple[Trace, Trace | None, Trace | None]:
    """The trace to simulate, to fit on, to calibrate on: no sequence is in two of them."""
    chosen = parse_sequences(sequences) if sequences else None
    whole = read_trace(path)
    judged = whole if chosen is None else whole.select(chosen)
    explicit = {
        option: parse_sequences(text, option)
        for option, text in (("--fit-sequences", fit), ("--calibrate-sequences", calibrate))
        if text
    }
    require(
        chosen is not None or not explicit, "--fit-sequences and --calibrate-sequences need --sequences beside them"
    )
    owner = dict.fromkeys(chosen or [], "--sequences")
    for option, numbers in explicit.items():
        for number in numbers:
            if owner.setdefault(number, option) != option:
                raise UsageError(f"{option}: sequence {number} is among {owner[number]} too; keep them apart")
    rest = [] if chosen is None else [i for i in range(whole.num_sequences) if i not in owner]
    cut = len(rest) - len(rest) // _CALIBRATE
    if "--calibrate-sequences" in explicit:
        cut = len(rest)
    elif "--fit-sequences" in explicit:
        cut = 0
    parts = {"--fit-sequences": rest[:cut], "--calibrate-sequences": rest[cut:], **explicit}
    made = [whole.select(numbers) if numbers else None for numbers in parts.values()]
    return judged, made[0], made[1]


def _slots(text: str, trace: Trace) -> list[tuple[float, int]]:
    total = trace.num_layers * trace.num_experts
    found = []
    for share in _numbers(text, "--residency takes shares such as 0.15,0.45"):
        require(0 < share <= 1, f"--residency must be above 0 and at most 1, got {share:g}")
        count = round(share * total)
        require(count >= trace.top_k, f"--residency {share:g} is {count} slots; a layer needs {trace.top_k}")
        found.append((share, count))
    return found


def result_table(rows: list[dict[str, Any]], record_bytes: int, title: str) -> Table:
    """A line each policy and setting. Columns that say nothing, such as the only link ratio, are left out."""
    caption = """records a step: moved in all; useful, late, wasted: of those fetched ahead
named: needed experts that the forecast named; ready: those of them that were there in time; on: steps with prefetch"""
    several = [key for key in ("link_ratio", "m_max") if len({row[key] for row in rows if row[key] is not None}) > 1]
    forecasts = any(row["named_rate"] for row in rows)
    table = Table(title=title, caption=caption if forecasts else caption.splitlines()[0])
    for name in ("policy", "predictor"):
        table.add_column(name, no_wrap=True)
    settings = [{"link_ratio": "link", "m_max": "M_max"}[key] for key in several]
    figures = ["hit rate", "of full speed", "moved", "useful", "late", "wasted"]
    for name in (*settings, "resident", *figures, *(("named", "ready", "on") if forecasts else ())):
        table.add_column(name, justify="right")
    last = ""
    for row in rows:
        if last and row["policy"] != last:
            table.add_section()
        each = [row[key] / record_bytes / row["steps"] for key in ("useful_bytes", "late_bytes", "wasted_bytes")]
        shares = [row[key] for key in ("named_rate", "ready_recall", "prefetch_on")]
        table.add_row(
            "" if row["policy"] == last else row["policy"],
            "" if row["policy"] == last else Path(row["predictor"] or "").name,
            *("" if row[key] is None else f"{row[key]:g}" for key in several),
            f"{row['residency']:.0%}",
            f"{row['hit_rate']:.4f}",
            f"{row['speed_of_full']:.3f}",
            f"{row['transfers_per_step']:.1f}",
            *(f"{value:.2f}" for value in each),
            *([f"{share:.3f}" if row["named_rate"] else "" for share in shares] if forecasts else []),
        )
        last = row["policy"]
    return table


def _compare(outcomes: dict[tuple[str, float, float, int | None], Outcome], against: str) -> list[dict[str, Any]]:
    """Differences in hit rate by sequence, with 95% intervals of their mean."""
    found = []
    for (name, share, ratio, m_max), outcome in outcomes.items():
        if name == against:
            continue
        other = outcomes[against, share, ratio, m_max]
        needed = outcome.hits + outcome.misses
        differences = ((outcome.hits - other.hits) / needed).tolist()
        low, high = interval(differences, seed=0) if len(differences) > 1 else (None, None)
        found.append({"policy": name, "against": against, "residency": share, "link_ratio": ratio, "m_max": m_max,
                      "hit_rate_gain": sum(differences) / len(differences), "low": low, "high": high})  # fmt: skip
    return found


def compared_table(compared: list[dict[str, Any]], against: str) -> Table:
    """The paired differences."""
    table = Table(
        title=f"hit rate against {against}, paired by sequence", caption="mean and its 95% interval, in points"
    )
    several = [key for key in ("link_ratio", "m_max") if len({row[key] for row in compared}) > 1]
    settings = [{"link_ratio": "link", "m_max": "M_max"}[key] for key in several]
    for name in ("policy", *settings, "resident", "gain", "from", "to"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for row in compared:
        ends = ("" if row[key] is None else f"{100 * row[key]:+.2f}" for key in ("low", "high"))
        where = (f"{row[key]:g}" for key in several)
        table.add_row(row["policy"], *where, f"{row['residency']:.0%}", f"{100 * row['hit_rate_gain']:+.2f}", *ends)
    return table


def plot_rows(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Hit rate and speed against residency, a line each policy, as PNG."""
    from seqmoe.predictors.plots import look, new_figure

    figure, (hits, speed) = new_figure(2)
    for place, name in enumerate(dict.fromkeys(row["policy"] for row in rows)):
        own = sorted((row for row in rows if row["policy"] == name), key=lambda row: row["residency"])
        x = [100 * row["residency"] for row in own]
        style: dict[str, Any] = {**look(place), "markersize": 5, "linewidth": 1.5}
        hits.plot(x, [100 * row["hit_rate"] for row in own], label=name, **style)
        speed.plot(x, [100 * row["speed_of_full"] for row in own], **style)
    hits.set_ylabel("hit rate (%)")
    speed.set_ylabel("decode speed (% of full load)")
    for axes in (hits, speed):
        axes.set_xlabel("residency (% of the experts)")
        axes.set_ylim(0, 102)
    hits.legend(frameon=False, fontsize=7)
    figure.suptitle(title)
    figure.savefig(path, format="png")
