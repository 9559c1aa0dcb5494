"""Several predictors as one: their scores multiplied, each raised to a fitted power (a logarithmic opinion pool).

    pooled[h, l] = softmax(sum over members of power[h, l, member] * log scores[h, l])        powers >= 0

One power a member, layer and step ahead, of least KL divergence on validation sequences. The weights of one member alone
are among what is fitted, so on those sequences the pool is never less likely than its best member. Loads without torch.
"""

from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from seqmoe.predictors.metrics import FIRST_ROW
from seqmoe.predictors.protocol import Predictor
from seqmoe.predictors.psi import psi_numpy, softmax
from seqmoe.predictors.trace import Trace
from seqmoe.profiles.errors import UsageError

Floats = NDArray[np.float32]
_LEAST = 1e-6  # of a score: what a predictor rules out may happen all the same
_NEWTON_STEPS = 12
_FIT_ROWS = 3000  # steps that the powers of a layer and a step ahead are fitted to


class Pool:
    """A Predictor made of others. `fit` must be called before it forecasts."""

    def __init__(self, members: Sequence[Predictor]) -> None:
        if len(members) < 2:
            raise UsageError(f"a pool needs at least two predictors, got {len(members)}")
        self.members = list(members)
        self.name = "+".join(member.name for member in members)
        self.uses_tokens = any(member.uses_tokens for member in members)
        self._powers: dict[bool, Floats] = {}  # by whether the token is known: [horizon, L, members]

    @property
    def nbytes(self) -> int:
        """Bytes that one forecast of all members reads."""
        return sum(member.nbytes for member in self.members)

    def fit(self, trace: Trace, horizon: int, with_tokens: bool) -> Self:
        """Fits the powers to validation sequences, for forecasts with or without the token. Returns itself."""
        logs: list[list[Floats]] = [[] for _ in range(horizon)]  # of each: [members, S, L, E]
        truths: list[list[Floats]] = [[] for _ in range(horizon)]
        stride = max(1, trace.num_steps // _FIT_ROWS)
        for i in range(trace.num_sequences):
            one = trace.sequence(i)
            chosen = psi_numpy(one.expert_ids, None, one.num_experts)
            scores = [member.forecast_trace(one, horizon, with_tokens) for member in self.members]
            for h in range(horizon):
                rows = slice(FIRST_ROW, max(FIRST_ROW, one.num_steps - h), stride)
                logs[h].append(log_scores(np.stack([part[rows, h] for part in scores])))
                truths[h].append(chosen[FIRST_ROW + h :: stride])
        powers = np.zeros((horizon, trace.num_layers, len(self.members)), dtype=np.float32)
        for h in range(horizon):
            features, truth = np.concatenate(logs[h], axis=1), np.concatenate(truths[h])
            if not len(truth):
                raise UsageError(f"a pool needs a validation sequence of more than {h + 1} steps")
            for layer in range(trace.num_layers):
                powers[h, layer] = fit_powers(features[:, :, layer], truth[:, layer])
        self._powers[with_tokens] = powers
        return self

    def start(self, batch: int) -> None:
        """See Predictor."""
        for member in self.members:
            member.start(batch)

    def observe(self, activations: Floats, tokens: NDArray[np.integer] | None = None) -> None:
        """See Predictor."""
        for member in self.members:
            member.observe(activations, tokens)

    def forecast(self, horizon: int, tokens: NDArray[np.integer] | None = None) -> Floats:
        """See Predictor."""
        return self._pooled([member.forecast(horizon, tokens) for member in self.members], tokens is not None)

    def forecast_trace(self, sequence: Trace, horizon: int, with_tokens: bool) -> Floats:
        """See Predictor."""
        scores = [member.forecast_trace(sequence, horizon, with_tokens) for member in self.members]
        return self._pooled(scores, with_tokens and sequence.tokens is not None)

    def _pooled(self, scores: list[Floats], with_tokens: bool) -> Floats:
        """Scores [.., horizon, L, E] of the members -> of the pool. Steps past those fitted use the last one's powers."""
        powers = self._powers.get(with_tokens)
        if powers is None:
            known = "with" if with_tokens else "without"
            raise UsageError(f"{self.name} has not been fitted to forecasts {known} tokens")
        horizon = scores[0].shape[-3]
        at = np.minimum(np.arange(horizon), len(powers) - 1)
        total = sum(powers[at, :, i, None] * log_scores(part) for i, part in enumerate(scores))
        return softmax(np.asarray(total))


def fit_powers(features: Floats, truth: Floats) -> NDArray[np.float64]:
    """Powers [n], none negative, of least KL from softmax(powers . features) to `truth`: projected Newton steps.

    features [n, S, E] logarithms of scores, truth [S, E] with rows that sum to 1. The loss is convex, so that steps which
    are halved until they help come to its least value.
    """

    def loss(powers: NDArray[np.float64]) -> float:
        logits = np.tensordot(powers, features, 1)
        top = logits.max(-1)
        return float((np.log(np.exp(logits - top[:, None]).sum(-1)) + top - (truth * logits).sum(-1)).mean())

    n = len(features)
    starts = np.eye(n)  # each member alone; the best of them is where it begins
    powers = min(starts, key=loss)
    best = loss(powers)
    for _ in range(_NEWTON_STEPS):
        p = softmax(np.tensordot(powers, features, 1))
        mean = (p * features).sum(-1)  # [n, S]
        gradient = (mean - (truth * features).sum(-1)).mean(-1)
        centred = (features - mean[..., None]) * np.sqrt(p)
        curvature = np.einsum("ise,jse->ij", centred, centred) / features.shape[1] + 1e-6 * np.eye(n)
        free = (powers > 0) | (gradient < 0)  # a power at 0 that would go below stays
        step = np.zeros(n)
        step[free] = np.linalg.solve(curvature[np.ix_(free, free)], gradient[free])
        for halvings in range(8):
            tried = np.maximum(powers - step / 2**halvings, 0)
            reached = loss(tried)
            if reached < best:
                break
        else:
            break
        powers, gained, best = tried, best - reached, reached
        if gained < 1e-7:
            break
    return powers


def log_scores(scores: NDArray[np.floating]) -> Floats:
    """Their logarithms, finite where a score is 0."""
    return np.log(np.maximum(scores, _LEAST)).astype(np.float32)
