"""Plots of `seqmoe bench`, as PNG, with colours that colour-blind readers can tell apart."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from seqmoe.predictors.plots import COLOURS, look, new_figure
from seqmoe.runtime.bench import MODES_WITHOUT_RESIDENCY, ArmResult, BenchResult, Spread
from seqmoe.runtime.models import model_id
from seqmoe.runtime.policy import POLICIES

Value = Callable[[ArmResult], Spread | None]

# of a step's time, in the order of the bars; the worker's own time runs beside them
_PARTS = (
    ("experts", "experts", COLOURS[0], ""),
    ("other", "other layers", COLOURS[4], ""),
    ("predictor", "predictor", COLOURS[2], "//"),
    ("management", "management", COLOURS[3], "\\\\"),
    ("stall", "waiting for the link", COLOURS[1], ".."),
)
_WHOLE = ("compute, not split", "0.65")  # mode full does not time its experts


def plot_bench(result: BenchResult, path: Path) -> None:
    """Tokens/s and MiB read per token against residency; a line each mode, bars from the least to the most repeat."""
    figure, axes = new_figure(2 * len(result.batches) or 2)
    for place, batch in enumerate(result.batches):
        names = (("decode_tokens_per_s", "tokens/s, decode"), ("read_mib_per_token", "MiB of experts read per token"))
        for panel, (name, label) in zip(axes[2 * place :], names, strict=False):
            _lines(panel, result, batch, partial(ArmResult.spread, name=name), _every)
            _dress(panel, label, batch if len(result.batches) > 1 else None)
            panel.set_ylim(bottom=0)
    _finish(figure, result, axes)
    figure.savefig(path, format="png")


def plot_figures(result: BenchResult, targets: Mapping[str, Path]) -> list[Path]:
    """Those of FIGURE_PLOTS for which there are data, each to the file that `targets` names; the files written."""
    written = []
    for name, draw in FIGURE_PLOTS.items():
        figure = draw(result)
        if figure is not None:
            figure.savefig(targets[name], format="png")
            written.append(targets[name])
    return written


def hit_rates(result: BenchResult) -> Figure | None:
    """Hit rate by residency, a line each mode (paper Fig. 7)."""
    return _by_residency(result, lambda arm: _scaled(arm.spread("hit_rate"), 100), "hit rate (%)", _keeps_some, top=102)


def evictions(result: BenchResult) -> Figure | None:
    """Hit rate by residency of the modes that fetch nothing ahead (paper Fig. 3); None for fewer than two."""

    def keep(arm: ArmResult) -> bool:
        plan = POLICIES[arm.arm.mode].plan
        return _keeps_some(arm) and plan is not None and plan.order is None

    if len({arm.arm.mode for arm in result.arms if arm.runs and keep(arm)}) < 2:
        return None
    return _by_residency(
        result, lambda arm: _scaled(arm.spread("hit_rate"), 100), "hit rate without prefetch (%)", keep, top=102
    )


def speeds(result: BenchResult) -> Figure | None:
    """Decode speed as a share of full's, by residency (paper Fig. 6)."""
    return _by_residency(
        result,
        lambda arm: _scaled(result.of_full(arm), 100),
        "decode speed (% of full)",
        lambda arm: arm.arm.mode != "full",
    )


def first_tokens(result: BenchResult) -> Figure | None:
    """Time to the first token by residency."""
    return _by_residency(result, partial(ArmResult.spread, name="ttft_s"), "time to first token (s)", _every)


def stalls(result: BenchResult) -> Figure | None:
    """Time that a step waits for the link, as a share of lru's, by residency; None where only lru itself has one."""
    if not any(result.stall_of_lru(arm) for arm in result.arms if arm.arm.mode != "lru"):
        return None
    return _by_residency(
        result, lambda arm: _scaled(result.stall_of_lru(arm), 100), "waiting per step (% of lru's)", _keeps_some
    )


def breakdown(result: BenchResult) -> Figure | None:
    """Where a decode step's time goes, stacked, a bar each arm (paper Fig. 9)."""
    arms = [arm for arm in result.arms if arm.runs]
    if not arms:
        return None
    batches = [batch for batch in result.batches if any(arm.arm.batch == batch for arm in arms)]
    rows = max(sum(arm.arm.batch == batch for arm in arms) for batch in batches)
    figure, panels = new_figure(len(batches), width_inches=5.6, height_inches=1.8 + 0.28 * rows)
    seen: dict[str, Any] = {}
    for panel, batch in zip(panels, batches, strict=True):
        own = [arm for arm in arms if arm.arm.batch == batch]
        for place, arm in enumerate(own):
            _stack(panel, place, arm, seen)
        panel.set_yticks(range(len(own)), [_name(arm) for arm in own], fontsize=8)
        panel.set_ylim(len(own) - 0.4, -0.6)  # the first on top
        panel.grid(axis="y", visible=False)
        panel.set_xlabel("ms per decode step")
        panel.set_xlim(left=0)
        if len(batches) > 1:
            panel.set_title(f"batch {batch}", fontsize=10)
    order = [label for label in (*(part[1] for part in _PARTS), _WHOLE[0]) if label in seen]
    handles = [seen[label] for label in order]
    figure.legend(handles, order, loc="outside lower center", ncols=len(order), frameon=False, fontsize=8)
    figure.suptitle(_title(result))
    return figure


FIGURE_PLOTS: dict[str, Callable[[BenchResult], Figure | None]] = {
    "hit-rate": hit_rates,
    "evictions": evictions,
    "speed-of-full": speeds,
    "first-token": first_tokens,
    "breakdown": breakdown,
    "stall-of-lru": stalls,
}


def _stack(axes: Axes, place: int, arm: ArmResult, seen: dict[str, Any]) -> None:
    spent = {key: max(0.0, 1000 * (arm.median(f"{key}_s_per_step") or 0.0)) for key, *_ in _PARTS}
    bars = [(label, spent[key], colour, hatch) for key, label, colour, hatch in _PARTS]
    if not spent["experts"]:
        bars = [(_WHOLE[0], spent["other"], _WHOLE[1], ""), *bars[2:]]
    left = 0.0
    for label, width, colour, hatch in bars:
        if width:
            bar = axes.barh(
                place, width, left=left, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5, height=0.75
            )
            seen.setdefault(label, bar)
        left += width


def _by_residency(
    result: BenchResult, value: Value, label: str, keep: Callable[[ArmResult], bool], *, top: float | None = None
) -> Figure | None:
    """A panel each batch size, a line each mode; None where there is no arm to show."""
    having = {arm.arm.batch for arm in result.arms if arm.runs and keep(arm) and value(arm) is not None}
    batches = [batch for batch in result.batches if batch in having]
    if not batches:
        return None
    figure, panels = new_figure(len(batches))
    for panel, batch in zip(panels, batches, strict=True):
        _lines(panel, result, batch, value, keep)
        _dress(panel, label, batch if len(batches) > 1 else None)
        panel.set_ylim(0, top)
    _finish(figure, result, panels)
    return figure


def _lines(axes: Axes, result: BenchResult, batch: int, value: Value, keep: Callable[[ArmResult], bool]) -> None:
    """Of the arms of one batch size; what looks how is the same in all plots."""
    modes = list(dict.fromkeys(arm.arm.mode for arm in result.arms))
    for place, mode in enumerate(modes):
        points = [
            (100 * (arm.residency or 0.0), spread)
            for arm in result.arms
            if arm.runs and arm.arm.mode == mode and arm.arm.batch == batch and keep(arm)
            if (spread := value(arm)) is not None
        ]
        if not points:
            continue
        points.sort(key=lambda point: point[0])
        middle = [spread.median for _, spread in points]
        below = [spread.median - spread.low for _, spread in points]
        above = [spread.high - spread.median for _, spread in points]
        style: dict[str, Any] = {"label": mode, "capsize": 3, "linewidth": 1.6, "markersize": 5.5, **look(place)}
        axes.errorbar([x for x, _ in points], middle, yerr=[below, above], **style)


def _dress(axes: Axes, label: str, batch: int | None) -> None:
    axes.set_xlabel("residency (% of the experts in memory)")
    axes.set_xlim(-3, 105)
    axes.set_ylabel(label)
    if batch is not None:
        axes.set_title(f"batch {batch}", fontsize=10)


def _finish(figure: Figure, result: BenchResult, panels: list[Axes]) -> None:
    """Title, and one legend for all panels."""
    found: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        figure.legend(found.values(), found.keys(), loc="outside right upper", frameon=False, fontsize=8)
    figure.suptitle(_title(result))


def _title(result: BenchResult) -> str:
    return f"{model_id(result.job['model'])}, link {result.job['link']}, medians of {result.repeats}"


def _every(arm: ArmResult) -> bool:
    return True


def _keeps_some(arm: ArmResult) -> bool:
    return arm.arm.mode not in MODES_WITHOUT_RESIDENCY


def _name(arm: ArmResult) -> str:
    share = "" if arm.residency is None or not _keeps_some(arm) else f" {arm.residency:.0%}"
    return f"{arm.arm.mode}{share}"


def _scaled(spread: Spread | None, factor: float) -> Spread | None:
    return None if spread is None else Spread(tuple(factor * value for value in spread.values))
