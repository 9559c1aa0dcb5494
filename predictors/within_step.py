"""Adapters and fusion of a trained predictor: fitting them into its folder, loading them, judging them. Loads without torch.

A folder that `seqmoe train` wrote may hold `adapters.safetensors` (SpecPrefetch's, one for each layer and distance) and
`fusion.json` (how they and the sequence predictor are pooled).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqmoe.predictors.fusion import FILE_NAME, Fusion, both_forecasts, fit_fusion, fused_scores
from seqmoe.predictors.metrics import RankCounts, Reliability
from seqmoe.predictors.protocol import LayerPredictor, Predictor
from seqmoe.predictors.routers import Routers, SpecPrefetch
from seqmoe.predictors.trace import Trace
from seqmoe.profiles.errors import UsageError

ADAPTERS = "adapters.safetensors"
SOURCES = ("sequence", "adapters", "fused")


@dataclass(frozen=True, eq=False)
class WithinStep:
    """Recall of a layer's experts by how many layers before they are asked for, of each half and of the fused forecast."""

    name: str
    k: int
    recall: NDArray[np.float64]  # [3 (SOURCES), depth, E]: at m = 1 to E, all layers that an adapter reaches from there
    error: NDArray[np.float64]  # [depth], expected calibration error above 0.1 of the fused confidences

    def at(self, source: str, distance: int, m: int) -> float:
        """Recall at m of one source, `distance` layers before."""
        return float(self.recall[SOURCES.index(source), distance - 1, m - 1])

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        ms = range(self.k, min(self.k + 8, self.recall.shape[2]) + 1)
        return {
            "predictor": self.name,
            "within_step": {
                str(d): {source: {str(m): self.at(source, d, m) for m in ms} for source in SOURCES}
                for d in range(1, self.recall.shape[1] + 1)
            },
            "fused_calibration_error": self.error.tolist(),
        }


def fit_within_step(
    folder: Path,
    predictor: Predictor,
    training: Trace,
    validation: Trace,
    routers: Routers | None,
    *,
    depth: int = 3,
    seed: int = 0,
    progress: Callable[[int, int, float], None] | None = None,
) -> tuple[SpecPrefetch, Fusion]:
    """Trains adapters on traces with router inputs, fits the fusion on validation ones, and writes both into `folder`."""
    adapters = SpecPrefetch.fit(training, routers, depth=depth, seed=seed, progress=progress)
    fusion = fit_fusion(predictor, adapters, validation, predictor.uses_tokens and validation.tokens is not None)
    adapters.save(folder / ADAPTERS)
    fusion.save(folder)
    return adapters, fusion


def load_within_step(folder: Path, num_layers: int, num_experts: int, k: int) -> tuple[SpecPrefetch, Fusion] | None:
    """What `fit_within_step` wrote, None where there is nothing. Errors as of its parts; UsageError for half of it."""
    there = [(folder / name).exists() for name in (ADAPTERS, FILE_NAME)]
    if not any(there):
        return None
    if not all(there):
        missing, found = (ADAPTERS, FILE_NAME) if not there[0] else (FILE_NAME, ADAPTERS)
        raise UsageError(f"{folder}: {found} is there without {missing}; train the adapters again")
    fusion = Fusion.load(folder, num_layers, k)
    adapters = SpecPrefetch.load(folder / ADAPTERS, num_layers, num_experts)
    if adapters.depth < fusion.depth:
        raise UsageError(f"{folder / FILE_NAME}: depth is {fusion.depth}, the adapters' is {adapters.depth}")
    return adapters, fusion


def evaluate_within_step(
    predictor: Predictor,
    adapters: LayerPredictor,
    fusion: Fusion,
    trace: Trace,
    with_tokens: bool,
    progress: Callable[[int, int], None] | None = None,
) -> WithinStep:
    """Judges both halves and the fused forecast on a trace with router inputs."""
    if trace.router_inputs is None:
        raise UsageError("router_inputs are not in this trace; collect it with router inputs")
    experts, layers, depth = trace.num_experts, trace.num_layers, fusion.depth
    # What is d + 1 layers ahead of an adapter are the layers from d + 1 on.
    ranks = [[RankCounts(1, layers - d - 1, experts) for d in range(depth)] for _ in SOURCES]
    reliability = [Reliability(1) for _ in range(depth)]
    for done, both in enumerate(both_forecasts(predictor, adapters, trace, with_tokens), 1):
        fused = fused_scores(fusion, both)
        for d in range(depth):
            reached = both.trace.layers(d + 1)
            parts = (both.sequence, both.adapters[:, :, d], fused[:, :, d])
            for source, scores in enumerate(parts):
                ranks[source][d].add(scores[:, None, d + 1 :], reached)
            confidence = fusion.calibration.apply_step(parts[2][:, d + 1 :], d)
            reliability[d].add(confidence[:, None], reached)
        if progress:
            progress(done, trace.num_sequences)
    recall = [[[one.recall(m).mean() for m in range(1, experts + 1)] for one in row] for row in ranks]
    error = np.array([one.error_above(0.1)[0] for one in reliability])
    return WithinStep(predictor.name, trace.top_k, np.array(recall), error)
