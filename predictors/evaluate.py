"""Runs predictors over a trace and counts what `metrics.py` counts. Loads without torch, unless a predictor needs it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqmoe.predictors.calibration import Calibration
from seqmoe.predictors.forecast import to_inclusion
from seqmoe.predictors.metrics import RankCounts, Reliability, brier_skill, lead_curve, leads
from seqmoe.predictors.protocol import LayerPredictor, Predictor
from seqmoe.predictors.psi import psi_numpy
from seqmoe.predictors.trace import Trace

EXTRA = 8  # recall is taken at m = k to k + EXTRA
_TIMED_STEPS = 48


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What one predictor scored on a trace (horizon h steps ahead, L layers)."""

    name: str
    with_tokens: bool
    calibrated: bool
    k: int
    recall: NDArray[np.float64]  # [EXTRA + 1 or less, horizon, L], at m = k, k + 1, ...
    brier: NDArray[np.float64]  # [horizon]
    calibration_error: NDArray[np.float64]  # [horizon], among forecasts above 0.1
    worst_sum: float  # largest |sum - k| / k of a layer's probabilities
    diagram: list[tuple[float, float, int]]  # one step ahead: (mean forecast, share that happened, how many)
    leads: list[tuple[int, float]]  # (layers ahead, recall at k + 3)
    nbytes: int
    ms: float  # median of one forecast (one step ahead) and the observation after it, batch 1
    ms_horizon: float  # the same with the whole horizon
    skill: NDArray[np.float64] | None = None  # [horizon], Brier skill over `reference`
    reference: str = ""

    @property
    def label(self) -> str:
        """For tables and plots: with "+ token" where a predictor that can do without was given the token."""
        return f"{self.name} + token" if self.with_tokens and self.name != "token" else self.name

    def recall_at(self, step: int = 0) -> dict[str, float]:
        """Mean recall over the layers by m."""
        return {str(self.k + i): float(self.recall[i, step].mean()) for i in range(len(self.recall))}

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        at = min(3, len(self.recall) - 1)
        return {
            "predictor": self.name,
            "with_tokens": self.with_tokens,
            "recall_at": self.recall_at(),
            "recall_at_step": {str(h + 1): self.recall_at(h) for h in range(self.recall.shape[1])},
            "recall_by_layer": {str(self.k): self.recall[0, 0].tolist(), str(self.k + at): self.recall[at, 0].tolist()},
            "lead": [{"layers": lead, "recall": recall} for lead, recall in self.leads],
            "brier": self.brier.tolist(),
            "brier_skill": None if self.skill is None else self.skill.tolist(),
            "brier_reference": self.reference or None,
            "calibrated": self.calibrated,
            "calibration_error": self.calibration_error.tolist(),
            "worst_sum_error": self.worst_sum,
            "reliability": [{"forecast": f, "happened": y, "count": n} for f, y, n in self.diagram],
            "forecast_bytes": self.nbytes,
            "forecast_ms": self.ms,
            "forecast_ms_horizon": self.ms_horizon,
        }

    def against(self, reference: "Evaluation") -> "Evaluation":
        """With the Brier skill over another predictor."""
        return replace(self, skill=brier_skill(self.brier, reference.brier), reference=reference.name)


def evaluate(
    predictor: Predictor,
    trace: Trace,
    horizon: int,
    *,
    with_tokens: bool,
    calibration: Calibration | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Recall at m = k to k + 8 for each step ahead and layer, calibration, lead time, bytes and time of a forecast.

    Without a calibration the scores become probabilities by water-filling.
    """
    k, layers, experts = trace.top_k, trace.num_layers, trace.num_experts
    ranks = RankCounts(horizon, layers, experts)
    reliability = Reliability(horizon)
    for i in range(trace.num_sequences):
        sequence = trace.sequence(i)
        scores = predictor.forecast_trace(sequence, horizon, with_tokens)
        ranks.add(scores, sequence)
        reliability.add(calibration.apply(scores) if calibration else to_inclusion(scores, k), sequence)
        if progress:
            progress(i + 1, trace.num_sequences)
    recall = np.stack([ranks.recall(m) for m in range(k, min(k + EXTRA, experts) + 1)])
    ahead = leads(horizon, layers, _triggers(predictor), with_tokens)
    longest = trace.sequence(int(trace.seq_len.argmax()))
    ms, ms_horizon = (_time_ms(predictor, longest, steps, with_tokens) for steps in (1, horizon))
    return Evaluation(
        predictor.name,
        with_tokens,
        calibration is not None,
        k,
        recall,
        reliability.brier(),
        reliability.error_above(0.1),
        reliability.worst_sum,
        reliability.diagram(),
        lead_curve(recall[min(3, len(recall) - 1)], ahead),
        int(getattr(predictor, "nbytes", 0)),
        ms,
        ms_horizon,
    )


@dataclass(frozen=True, eq=False)
class LayerEvaluation:
    """What a predictor within the step scored: recall by layers ahead."""

    name: str
    k: int
    recall: NDArray[np.float64]  # [EXTRA + 1 or less, depth, L]: of layer l, forecast d + 1 layers before; NaN: none
    nbytes: int
    ms: float  # median of one refinement, batch 1

    def recall_ahead(self, m: int) -> list[float]:
        """Mean recall at m by layers ahead, from 1."""
        return [float(value) for value in np.nanmean(self.recall[m - self.k], axis=1)]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        ms = [self.k + i for i in range(len(self.recall))]
        return {
            "predictor": self.name,
            "recall_at": {str(m): self.recall_ahead(m)[0] for m in ms},
            "recall_at_layers_ahead": {
                str(d + 1): {str(m): self.recall_ahead(m)[d] for m in ms} for d in range(self.recall.shape[1])
            },
            "forecast_bytes": self.nbytes,
            "forecast_ms": self.ms,
        }


def evaluate_layers(
    predictor: LayerPredictor, trace: Trace, progress: Callable[[int, int], None] | None = None
) -> LayerEvaluation:
    """Recall of each layer's experts by how many layers before they were forecast. Needs router inputs."""
    from seqmoe.predictors.kernels import count_ranks

    k, layers, experts = trace.top_k, trace.num_layers, trace.num_experts
    depth = min(predictor.depth, layers - 1)
    counts = np.zeros((depth, layers, experts), dtype=np.int64)
    times: list[float] = []
    for i in range(trace.num_sequences):
        sequence = trace.sequence(i)
        ids = np.ascontiguousarray(sequence.expert_ids)
        for layer in range(layers - 1):
            inputs = sequence.router_input(layer)
            rows = np.empty((len(inputs), min(depth, layers - 1 - layer), experts), dtype=np.float32)
            for t in range(len(inputs)):
                begin = time.perf_counter()
                rows[t] = predictor.refine(layer, inputs[t : t + 1])[: rows.shape[1]]
                times.append(time.perf_counter() - begin)
            for d in range(rows.shape[1]):
                part, truth = np.ascontiguousarray(rows[:, d : d + 1]), ids[:, layer + d + 1 : layer + d + 2]
                count_ranks(part, np.ascontiguousarray(truth), counts[d, layer + d + 1 : layer + d + 2])
        if progress:
            progress(i + 1, trace.num_sequences)
    total = counts.sum(axis=2)
    found = np.stack([counts[:, :, :m].sum(axis=2) for m in range(k, min(k + EXTRA, experts) + 1)])
    recall = np.where(total > 0, found / np.maximum(total, 1), np.nan)
    return LayerEvaluation(predictor.name, k, recall, int(predictor.nbytes), 1e3 * float(np.median(times)))


def _triggers(predictor: Predictor) -> tuple[int, ...]:
    """Where the layers are split; nothing for a predictor of all layers at once."""
    return tuple(getattr(getattr(predictor, "config", None), "split", ()))


def _time_ms(predictor: Predictor, sequence: Trace, horizon: int, with_tokens: bool) -> float:
    """Median time of forecast and observation over some steps of a sequence; 0 where it cannot run step by step."""
    activations = psi_numpy(sequence.expert_ids, sequence.expert_weights, sequence.num_experts)
    tokens = sequence.tokens if with_tokens else None
    if predictor.name == "oracle":  # knows its future only in forecast_trace
        return 0.0
    predictor.start(1)
    times = []
    for step in range(min(_TIMED_STEPS, sequence.num_steps)):
        fed = None if tokens is None else tokens[step : step + 1]
        begin = time.perf_counter()
        predictor.forecast(horizon, fed)
        predictor.observe(activations[step : step + 1], fed)
        times.append(time.perf_counter() - begin)
    return 1e3 * float(np.median(times))


def plot_evaluations(evaluations: list[Evaluation], path: Path) -> None:
    """Recall against m, against steps ahead, against layers ahead, and reliability, a line each predictor, as PNG."""
    from seqmoe.predictors.plots import look, new_figure

    figure, (by_m, by_step, by_lead, reliability) = new_figure(4)
    for place, found in enumerate(evaluations):
        k = found.k
        at = min(3, len(found.recall) - 1)
        style: dict[str, Any] = {**look(place), "markersize": 4, "linewidth": 1.5}
        means = found.recall.mean(axis=2)  # [m, horizon]
        by_m.plot(range(k, k + len(means)), means[:, 0], label=found.label, **style)
        by_step.plot(range(1, means.shape[1] + 1), means[at], **style)
        by_lead.plot([lead for lead, _ in found.leads], [r for _, r in found.leads], **{**style, "marker": ""})
        reliability.plot([f for f, _, _ in found.diagram], [y for _, y, _ in found.diagram], **style)
    at = min(3, len(evaluations[0].recall) - 1) + evaluations[0].k
    by_m.set_xlabel("experts taken (m)")
    by_m.set_ylabel("recall, one step ahead")
    by_m.legend(frameon=False, fontsize=7)
    by_step.set_xlabel("steps ahead")
    by_step.set_ylabel(f"recall at {at}")
    by_lead.set_xlabel("known at least so many layers before use")
    by_lead.set_ylabel(f"recall at {at}")
    reliability.plot([0, 1], [0, 1], color="black", linestyle=":", linewidth=1)
    reliability.set_xlabel("forecast probability")
    reliability.set_ylabel("share that was chosen")
    for axes in (by_m, by_step, by_lead, reliability):
        axes.set_ylim(0, 1.02)
    figure.savefig(path, format="png")
