"""The learning curve of a training as a picture."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def plot_history(history: list[dict[str, Any]], path: Path) -> None:
    """KL of training and validation, and validation recall at k + 3 for 1, 2, 4 and 8 steps ahead, over the steps."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    steps = [row["step"] for row in history]
    left.plot(steps, [row["train_kl"] for row in history], label="training", marker=".")
    if history and "kl" in history[0]:
        left.plot(steps, [row["kl"] for row in history], label="validation", marker=".")
        for ahead in ("1", "2", "4", "8"):
            if ahead in history[0]["recall_at_step"]:
                values = [row["recall_at_step"][ahead] for row in history]
                right.plot(steps, values, label=f"{ahead} step{'s' * (ahead != '1')} ahead", marker=".")
        right.legend()
    own = [row["step"] for row in history if row["own_share"]]
    if own:
        for axis in (left, right):
            axis.axvspan(own[0], steps[-1], alpha=0.1, label="scheduled sampling")
    left.set(xlabel="step", ylabel="KL (nats a layer)", title="loss")
    right.set(xlabel="step", ylabel="recall at k + 3", title="validation recall")
    left.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
