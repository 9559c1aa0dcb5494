"""Forecasts while the model decodes: a predictor fed with what the layers route, or what is known of a replayed trace."""

from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from seqmoe.predictors.calibration import MODES, Calibration, load_calibration
from seqmoe.predictors.calibration_fast import FastCalibration
from seqmoe.predictors.protocol import Predictor
from seqmoe.predictors.psi import psi_numpy
from seqmoe.predictors.trace_forecasts import TraceForecasts

PREFILL_STEPS = 256  # of a prompt's end that the predictor is shown: each costs it a step
Scores = NDArray[np.float32]


class Forecaster(Protocol):
    """Inclusion probabilities of the coming steps (L layers, E experts a layer, b sequences)."""

    def start(self, batch: int) -> None:
        """A request of `batch` new sequences begins."""

    def routed(self, layer: int, index: torch.Tensor, weights: torch.Tensor) -> None:
        """A layer of the pass that runs has routed: index int64 [tokens, k], weights [tokens, k]."""

    def prompt_over(self, tokens: NDArray[np.int64] | None, lengths: NDArray[np.int64]) -> None:
        """A prompt has run: its tokens [b, n], padded on the left, None where not known, and their `lengths` [b]."""

    def at_start(self, row: int, tokens: NDArray[np.int64] | None) -> Scores | None:
        """A decode step is about to be fed `tokens` [b], None where they are not known: [horizon, L, E], mean over the
        batch. `row`: of the replayed trace, or the number of the step. None: nothing can be said."""

    def after_last(self, row: int) -> Scores | None:
        """The last layer of a step has routed: of the step `row` that comes next, its token not being known."""


class OnlineForecaster:
    """A predictor behind `Forecaster`. Not finite scores are passed on: whoever takes them looks."""

    def __init__(
        self,
        predictor: Predictor,
        shape: tuple[int, int, int],
        horizon: int,
        calibrations: dict[str, Calibration] | None = None,
    ) -> None:
        """`shape`: L, E, k; `horizon`: steps of a forecast; `calibrations` by mode, none: scores are scaled to sum to k."""
        self.predictor = predictor
        self.layers, self.experts, self.top_k = shape
        self.horizon = horizon
        known = calibrations or {}
        self._to_inclusion = [FastCalibration(known.get(mode), self.top_k) for mode in MODES]  # without, with tokens
        self.start(1)

    def start(self, batch: int) -> None:
        """See Forecaster."""
        self.predictor.start(batch)
        self.batch = batch
        ids = torch.zeros((self.layers, batch, self.top_k), dtype=torch.int64)
        weights = torch.zeros((self.layers, batch, self.top_k))
        self._ids, self._weights = ids.numpy().swapaxes(0, 1), weights.numpy().swapaxes(0, 1)  # [b, L, k]
        self._row_of = [(ids[layer], weights[layer]) for layer in range(self.layers)]  # for torch's cheaper copies
        self._prompt: list[tuple[NDArray[np.int64], Scores]] = []  # by layer, in the order of the passes
        self._fed: NDArray[np.int64] | None = None  # tokens of the step that was routed
        self._pending = False  # a routed step that the predictor has not been shown

    def routed(self, layer: int, index: torch.Tensor, weights: torch.Tensor) -> None:
        """See Forecaster."""
        if index.shape[0] == self.batch and not self._prompt:
            own_ids, own_weights = self._row_of[layer]
            own_ids.copy_(index)
            own_weights.copy_(weights)
            self._pending = layer == self.layers - 1
            return
        self._prompt.append((index.numpy().copy(), weights.float().numpy().copy()))

    def prompt_over(self, tokens: NDArray[np.int64] | None, lengths: NDArray[np.int64]) -> None:
        """See Forecaster. The predictor is shown the prompt's end."""
        passes, self._prompt = self._prompt, []
        if not passes:
            return
        shown = min(PREFILL_STEPS, int(lengths.min()))
        parts = []
        for kind in (0, 1):
            by_layer = [
                np.concatenate(
                    [part[kind].reshape(self.batch, -1, self.top_k) for part in passes[layer :: self.layers]], axis=1
                )[:, -shown:]
                for layer in range(self.layers)
            ]
            parts.append(np.stack(by_layer, axis=2))  # [b, shown, L, k]
        for step in range(parts[0].shape[1]):
            fed = None if tokens is None else tokens[:, -parts[0].shape[1] + step]
            self.predictor.observe(self._psi(parts[0][:, step], parts[1][:, step]), fed)

    def at_start(self, row: int, tokens: NDArray[np.int64] | None) -> Scores | None:
        """See Forecaster."""
        self._show()
        self._fed = tokens
        return self._forecast(tokens)

    def after_last(self, row: int) -> Scores | None:
        """See Forecaster."""
        self._show()
        return self._forecast(None)

    def _show(self) -> None:
        if self._pending:
            self._pending = False
            self.predictor.observe(self._psi(self._ids, self._weights), self._fed)

    def _forecast(self, tokens: NDArray[np.int64] | None) -> Scores:
        known = tokens is not None and self.predictor.uses_tokens
        scores = self.predictor.forecast(self.horizon, tokens)
        if scores.dtype.kind != "f" or scores.min(initial=0.0) < 0:  # calibration would make something of it
            raise ValueError("the predictor's scores are not numbers of at least 0")
        inclusion = self._to_inclusion[known].apply(scores)
        return inclusion[0] if self.batch == 1 else inclusion.mean(axis=0)

    def _psi(self, ids: NDArray[np.int64], weights: Scores) -> Scores:
        # a router whose weights are no shares still says whom it chose
        known = weights if np.isfinite(weights.sum()) and weights.min() >= 0 else None
        return psi_numpy(ids, known, self.experts)


class TraceForecaster:
    """Forecasts that were made beforehand for every row of the trace that is replayed, from its beginning."""

    def __init__(self, forecasts: TraceForecasts) -> None:
        self.forecasts = forecasts

    def start(self, batch: int) -> None:
        """See Forecaster."""

    def routed(self, layer: int, index: torch.Tensor, weights: torch.Tensor) -> None:
        """See Forecaster."""

    def prompt_over(self, tokens: NDArray[np.int64] | None, lengths: NDArray[np.int64]) -> None:
        """See Forecaster."""

    def at_start(self, row: int, tokens: NDArray[np.int64] | None) -> Scores | None:
        """See Forecaster."""
        return self.forecasts.start[row % len(self.forecasts.start)].astype(np.float32)

    def after_last(self, row: int) -> Scores | None:
        """See Forecaster."""
        after = self.forecasts.after
        return None if after is None else after[row % len(after)].astype(np.float32)


def load_calibrations(folder: Path, top_k: int) -> dict[str, Calibration]:
    """A predictor folder's calibrations by mode, none where it has none."""
    return load_calibration(folder, top_k) if folder.is_dir() else {}
