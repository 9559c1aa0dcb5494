"""Plots of `seqmoe bench`, as PNG, with colours that colour-blind readers can tell apart."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from seqmoe.predictors.plots import COLOURS, MARKERS, new_figure
from seqmoe.runtime.bench import FIGURES, ArmResult, BenchResult
from seqmoe.runtime.models import model_id


def plot_bench(result: BenchResult, path: Path) -> None:
    """Tokens/s and MiB read per token against residency; a line each mode, bars from the least to the most repeat."""
    figure, (speed, reads) = new_figure(2)
    modes = list(dict.fromkeys(arm.arm.mode for arm in result.arms if arm.runs))
    for place, mode in enumerate(modes):
        arms = sorted((a for a in result.arms if a.runs and a.arm.mode == mode), key=lambda a: a.runs[-1]["residency"])
        look = {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)], "label": mode}
        _line(speed, arms, "decode_tokens_per_s", look)
        _line(reads, arms, "read_mib_per_token", look)
    speed.set_ylabel("tokens/s, decode")
    reads.set_ylabel("MiB of experts read per token")
    for axes in (speed, reads):
        axes.set_xlabel("residency (% of the experts in memory)")
        axes.set_xlim(-3, 105)
        axes.set_ylim(bottom=0)
    if modes:
        speed.legend(frameon=False)
    figure.suptitle(f"{model_id(result.job['model'])}, link {result.job['link']}, medians of {result.repeats}")
    figure.savefig(path, format="png")


def _line(axes: Axes, arms: list[ArmResult], figure: str, look: dict[str, Any]) -> None:
    spreads = [arm.spread(FIGURES[figure]) for arm in arms]
    middle = [spread.median for spread in spreads]
    below = [spread.median - spread.low for spread in spreads]
    above = [spread.high - spread.median for spread in spreads]
    x = [100 * float(arm.runs[-1]["residency"]) for arm in arms]
    axes.errorbar(x, middle, yerr=[below, above], capsize=3, linewidth=1.6, markersize=6, **look)
