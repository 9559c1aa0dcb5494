"""What all plots have in common: PNG, with colours that colour-blind readers can tell apart. No display needed."""

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's palette, without yellow, which is too pale on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", ":")
_STYLE = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3}


def new_figure(panels: int, width_inches: float = 4.6, height_inches: float = 3.8) -> tuple[Figure, list[Axes]]:
    """A figure of panels side by side."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width_inches * panels, height_inches), layout="constrained", dpi=150)
        axes = figure.subplots(1, panels, squeeze=False)
    return figure, list(axes[0])


def look(place: int) -> dict[str, str]:
    """Colour, marker and line style of the line at `place`; no two of the first 21 look the same."""
    n = len(COLOURS)
    return {"color": COLOURS[place % n], "marker": MARKERS[place % n], "linestyle": LINES[place // n % len(LINES)]}
