"""What every predictor of experts can do, and the plain loop that all of them must equal. Loads without torch.

Time: step s is about to run. A predictor has observed steps 0 to s-1 of its sequences; row h of a forecast is for step
s + h. The token of step s is known from the step's first layer on (sampling ends step s-1), so a forecast may be asked
for twice: without it, then with it.
"""

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from seqmoe.predictors.psi import psi_numpy
from seqmoe.predictors.trace import Trace


@runtime_checkable
class Predictor(Protocol):
    """Forecasts whole steps, from what the steps before chose (L layers, E experts a layer, k chosen, b sequences)."""

    name: str
    uses_tokens: bool  # a forecast with the token about to be fed differs from one without

    @property
    def nbytes(self) -> int:
        """Bytes of weights and tables that one forecast reads."""

    def start(self, batch: int) -> None:
        """Forget everything: `batch` new sequences begin."""

    def observe(self, activations: NDArray[np.float32], tokens: NDArray[np.integer] | None = None) -> None:
        """A step has run: its Psi [b, L, E] and, where they are known, the tokens [b] that were fed in it."""

    def forecast(self, horizon: int, tokens: NDArray[np.integer] | None = None) -> NDArray[np.float32]:
        """Scores [b, horizon, L, E] of the coming steps, each [E] of them not negative and with sum 1.

        `tokens` [b] are about to be fed in the next step, None while they are not known. Changes no state: calling it
        twice, or with and without tokens, gives the same as calling it once.
        """

    def forecast_trace(self, sequence: Trace, horizon: int, with_tokens: bool) -> NDArray[np.float32]:
        """Scores [S, horizon, L, E] for a trace of one sequence: row t is what `forecast` gives after the steps before
        t were observed (and with token t, if `with_tokens`). Leaves the state of `start` to `forecast` undefined."""


@runtime_checkable
class LayerPredictor(Protocol):
    """Forecasts the coming layers of the step that is running, from a layer's router input."""

    name: str
    depth: int  # layers ahead, at most

    @property
    def nbytes(self) -> int:
        """Bytes that one refinement reads."""

    def refine(self, layer: int, router_input: NDArray[np.floating]) -> NDArray[np.float32]:
        """The input [b, H] of `layer`'s router -> scores [d, E] of layers layer + 1 to layer + d, each summed over the
        batch (sum b); d = min(depth, L - 1 - layer), which is 0 at the last layer."""


def replay_forecasts(predictor: Predictor, sequence: Trace, horizon: int, with_tokens: bool) -> NDArray[np.float32]:
    """What `forecast_trace` must give, step by step: [S, horizon, L, E]. Slow; the reference of the contract test."""
    activations = psi_numpy(sequence.expert_ids, sequence.expert_weights, sequence.num_experts)  # [S, L, E]
    tokens = sequence.tokens if with_tokens else None
    predictor.start(1)
    rows = []
    for step in range(sequence.num_steps):
        fed = None if tokens is None else tokens[step : step + 1]
        rows.append(predictor.forecast(horizon, fed)[0])
        predictor.observe(activations[step : step + 1], fed)
    return np.stack(rows)
