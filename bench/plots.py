"""Plots of the benchmarks' JSON files.

python bench/plots.py peers.json peers.png
"""

import json
from pathlib import Path
from typing import Any

import click

from seqmoe.predictors.plots import COLOURS, new_figure

PEER_COLOURS = {"seqmoe": COLOURS[0], "llamacpp": COLOURS[1], "accelerate": COLOURS[2], "accelerate-map": COLOURS[3]}


def plot_peers(report: dict[str, Any], path: Path) -> None:
    """One panel for each memory limit: tokens/s of every peer as bars, with least and most, and MiB read per token."""
    shares = list(dict.fromkeys(arm["share"] for arm in report["arms"]))
    rows = max(sum(arm["share"] == share for arm in report["arms"]) for share in shares)
    figure, panels = new_figure(len(shares), width_inches=5.8, height_inches=1.6 + 0.45 * rows)
    for axes, share in zip(panels, shares, strict=True):
        arms = [arm for arm in report["arms"] if arm["share"] == share][::-1]
        for place, arm in enumerate(arms):
            if not arm["repeats"]:
                axes.text(0, place, " failed" if arm["error"] else " not run", va="center", fontsize=8, color="0.4")
                continue
            speed = arm["decode_tokens_per_s"]
            error = [[speed["median"] - speed["min"]], [speed["max"] - speed["median"]]]
            axes.barh(place, speed["median"], xerr=error, color=PEER_COLOURS[arm["peer"]], capsize=3, height=0.7)
            text = f"  {speed['median']:.2f}  ({arm['read_mib_per_token']['median']:.0f} MiB/token)"
            axes.text(speed["max"], place, text, va="center", fontsize=8)
        axes.set_yticks(range(len(arms)), [_name(arm, report) for arm in arms], fontsize=8)
        axes.set_ylim(-0.6, max(len(arms), 1) - 0.4)
        axes.margins(x=0.4)
        axes.set_xlim(left=0)
        axes.set_xlabel("tokens/s, decode")
        title = "no limit" if share is None else f"room for {share:.0%} of the experts"
        if share is not None:
            title += f" ({report['limits_mib'][f'{share:g}']:.0f} MiB)"
        axes.set_title(title, fontsize=10)
        axes.grid(axis="y", visible=False)
    figure.suptitle(
        f"{report['model']}, {report['threads']} threads, cold caches, medians of {report['repeats']}", fontsize=11
    )
    figure.savefig(path, format="png")


def _name(arm: dict[str, Any], report: dict[str, Any]) -> str:
    if arm["peer"] == "seqmoe" or arm["share"] is None:
        return str(arm["peer"])
    return f"{arm['peer']}\nread-ahead {arm['read_ahead'] or report['disk_read_ahead_kib']} KiB"


@click.command()
@click.argument("report", type=click.Path(exists=True, path_type=Path))
@click.argument("png", type=click.Path(path_type=Path))
def main(report: Path, png: Path) -> None:
    """Plot the file REPORT, written by `peers.py --out`, to the file PNG."""
    data = json.loads(report.read_text())
    if data.get("kind") != "peers":
        raise click.UsageError(f"{report}: not a report of peers.py")
    plot_peers(data, png)


if __name__ == "__main__":
    main()
