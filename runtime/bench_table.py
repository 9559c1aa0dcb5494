"""The table of `seqmoe bench`."""

from collections.abc import Callable

from rich.markup import escape
from rich.table import Table

from seqmoe.runtime.bench import ArmResult, BenchResult, Spread
from seqmoe.runtime.models import model_id

Show = Callable[[Spread], str]


def bench_table(result: BenchResult) -> Table:
    """One row an arm: medians, and the extremes of the speeds where there are several repeats."""
    job = result.job
    title = f"{model_id(job['model'])}, link {job['link']}"
    if job.get("predictor"):
        title += f", predictor {job['predictor']}"
    if job.get("replay"):
        title += f", routing of {job['replay']}"
    caption = (
        f"medians of {result.repeats}, \\[least - most]; of decode steps, but for the first token. transfers, MiB: "
        "experts loaded on demand and fetched ahead; waiting, predictor, management: of decode time"
    )
    table = Table(title=escape(title), caption=caption)
    columns = [
        "mode",
        "residency",
        "batch",
        "tokens/s",
        "of full",
        "hit rate",
        "transfers/step",
        "MiB/token",
        "waiting",
    ]
    columns += ["predictor", "management", "first token", "peak RSS"]
    with_full = any(result.of_full(arm) for arm in result.arms)
    for name in columns:
        if name != "of full" or with_full:
            table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=name == "mode")
    failed = any(arm.error for arm in result.arms)
    if failed:
        table.add_column("failed", style="red", overflow="fold")
    last = None
    for arm in result.arms:
        if last is not None and arm.arm.batch != last:
            table.add_section()
        last = arm.arm.batch
        cells = [arm.arm.mode, "" if arm.residency is None else f"{arm.residency:.1%}", str(arm.arm.batch)]
        cells.append(_show(arm.spread("decode_tokens_per_s"), _with_range("{:.2f}")))
        if with_full:
            cells.append(_show(result.of_full(arm), _with_range("{:.1%}")))
        cells += _figures(arm)
        table.add_row(*cells, *([escape(arm.error or "")] if failed else []))
    return table


def _figures(arm: ArmResult) -> list[str]:
    shown: list[tuple[str, Show]] = [
        ("hit_rate", _median("{:.3f}")),
        ("transfers_per_step", _median("{:.1f}")),
        ("read_mib_per_token", lambda spread: f"{spread.median:.{1 if spread.median >= 10 else 2}f}"),
        ("stall_share", _median("{:.0%}")),
        ("predictor_share", _median("{:.1%}")),
        ("management_share", _median("{:.1%}")),
        ("ttft_s", _median("{:.2f} s")),
        ("peak_rss_mib", lambda spread: f"{spread.high:.0f} MiB"),
    ]
    return [_show(arm.spread(name), show) for name, show in shown]


def _show(spread: Spread | None, show: Show) -> str:
    return "" if spread is None else show(spread)


def _median(text: str) -> Show:
    return lambda spread: text.format(spread.median)


def _with_range(text: str) -> Show:
    def show(spread: Spread) -> str:
        middle, low, high = (text.format(value) for value in (spread.median, spread.low, spread.high))
        return middle if len(spread.values) < 2 else escape(f"{middle} [{low} - {high}]")

    return show
