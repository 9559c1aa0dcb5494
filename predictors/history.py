"""Rivals that learn from history: Patterns-MoE, MoE-Infinity, nearest past step, ridge regression. Without torch."""

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from seqmoe.predictors.psi import psi_numpy
from seqmoe.predictors.rivals import Rival, Scores, Tokens, TokenTable, repeated, shifted
from seqmoe.predictors.trace import Trace
from seqmoe.profiles.errors import UsageError

_FLOOR = 1e-6


class Patterns(Rival):
    """Patterns-MoE (Yu et al. 2026; SeqMoE section 9.4): per layer, P(expert at the next token | expert at this one).

    "mean": the rows of the experts just chosen, averaged; "bayes": their evidence multiplied (naive Bayes). Further
    steps ahead by powers of the matrix: first-order Markov, without memory.
    """

    def __init__(self, method: str = "mean", prior_uses: float = 2.0) -> None:
        super().__init__()
        if method not in ("mean", "bayes"):
            raise UsageError(f"Patterns takes method mean or bayes, got {method!r}")
        self.name = "patterns" if method == "mean" else "patterns-bayes"
        self.method = method
        self.prior_uses = prior_uses
        self._next: Scores = np.empty((0, 0, 0), dtype=np.float32)  # [L, from, to], rows sum to 1
        self._log_prior: NDArray[np.float64] = np.empty((0, 0))  # [L, E]
        self._evidence: NDArray[np.float64] = np.empty((0, 0, 0))  # [L, chosen before, E], added for each chosen

    def fit(self, trace: Trace) -> Self:
        """See Rival."""
        super().fit(trace)
        experts = trace.num_experts
        inside = np.ones(trace.num_steps - 1, dtype=bool)
        inside[trace.seq_start[1:] - 1] = False
        counts = np.zeros((trace.num_layers, experts, experts))
        for layer in range(trace.num_layers):
            ids = trace.expert_ids[:, layer].astype(np.int64)
            pairs = ids[:-1][inside][:, :, None] * experts + ids[1:][inside][:, None, :]
            counts[layer] = np.bincount(pairs.ravel(), minlength=experts**2).reshape(experts, experts)
        counts += self.prior_uses * trace.top_k * self.popularity[:, None, :]
        chance = counts / counts.sum(axis=2, keepdims=True)
        self._next = chance.astype(np.float32)
        self._log_prior = np.log(self.popularity.astype(np.float64))
        # P(e | e') / P(e) = P(e' | e) / P(e')
        self._evidence = np.log(chance) - self._log_prior[:, None, :]
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices."""
        return self._next.nbytes + (self._evidence.nbytes if self.method == "bayes" else 0)

    def _scores(self, state: Any, horizon: int, tokens: Tokens) -> Scores:
        batch, layers, experts = state.shape
        seen = state.sum(axis=2) > 0  # [b, L]
        out = np.empty((batch, horizon, layers, experts), dtype=np.float32)
        for layer in range(layers):
            rows = state[:, layer]
            if self.method == "mean":
                scores = rows @ self._next[layer]
            else:
                logits = self._log_prior[layer] + (rows > 0) @ self._evidence[layer]
                scores = np.exp(logits - logits.max(axis=1, keepdims=True)).astype(np.float32)
                scores /= scores.sum(axis=1, keepdims=True)
            scores = np.where(seen[:, layer, None], scores, self.popularity[layer])
            for h in range(horizon):
                out[:, h, layer] = scores
                scores = scores @ self._next[layer]
        return out / out.sum(axis=3, keepdims=True)


class MoEInfinity(Rival):
    """MoE-Infinity (Xue et al. 2025): the request's activation matrix so far is matched, by cosine, against those of past
    requests (the training sequences); the nearest one's experts are the forecast, for every step ahead."""

    name = "infinity"

    def __init__(self) -> None:
        super().__init__()
        self._past: NDArray[np.float64] = np.empty((0, 0))  # [n, L * E], length 1 each

    def fit(self, trace: Trace) -> Self:
        """See Rival."""
        super().fit(trace)
        matrices = np.stack([trace.sequence(i).popularity() for i in range(trace.num_sequences)]).astype(np.float64)
        self._past = matrices / np.linalg.norm(matrices, axis=1, keepdims=True)
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the past matrices, all of which are compared."""
        return self._past.nbytes

    def _advance(self, state: Any, activations: Scores, tokens: Tokens) -> Any:
        return state + (activations > 0)

    def _states(self, activations: Scores, tokens: Tokens) -> Any:
        return np.cumsum(shifted((activations > 0).astype(np.float32)), axis=0, dtype=np.float32)

    def _scores(self, state: Any, horizon: int, tokens: Tokens) -> Scores:
        nearest = (state.reshape(len(state), -1).astype(np.float64) @ self._past.T).argmax(axis=1)
        scores = self._past[nearest].reshape(state.shape) + _FLOOR * self.popularity
        scores = (scores / scores.sum(axis=2, keepdims=True)).astype(np.float32)
        seen = state.sum(axis=(1, 2)) > 0
        return repeated(np.where(seen[:, None, None], scores, self.popularity), horizon)


class NearestStep(Rival):
    """Iteration-level matching (Taming-MoE, SeqMoE section 2): the last step is compared, by cosine, with the earlier
    steps of the request; what followed the nearest ones is the forecast. Soft, so that there are no ties."""

    name = "nearest-step"

    def __init__(self, sharpness: float = 12.0, prior: float = 0.02) -> None:
        super().__init__()
        self.sharpness = sharpness
        self.prior = prior

    def _begin(self, batch: int) -> Any:
        return np.zeros((batch, 0, *self.popularity.shape), dtype=np.float32)  # [b, steps so far, L, E]

    def _advance(self, state: Any, activations: Scores, tokens: Tokens) -> Any:
        return np.concatenate([state, activations[:, None]], axis=1)

    def _scores(self, state: Any, horizon: int, tokens: Tokens) -> Scores:
        steps = np.array([state.shape[1]])
        return np.stack([self._of_history(history, steps, horizon)[0] for history in state])

    def forecast_trace(self, sequence: Trace, horizon: int, with_tokens: bool) -> Scores:
        """See Predictor."""
        self._check_trace(sequence)
        history = psi_numpy(sequence.expert_ids, sequence.expert_weights, sequence.num_experts)
        return self._of_history(history, np.arange(len(history)), horizon)

    def _of_history(
        self,
        history: Scores,
        steps: NDArray[np.int64],
        horizon: int,
        favour: NDArray[np.float32] | None = None,
        first: Scores | None = None,
    ) -> Scores:
        """Forecasts [len(steps), horizon, L, E] before the given steps of one sequence's Psi [S, L, E].

        `favour` [len(steps), S]: factors for the past steps as an answer; `first` [len(steps), L, E]: added to the step
        that comes next.
        """
        layers, experts = self.popularity.shape
        out = np.empty((len(steps), horizon, layers, experts), dtype=np.float32)
        flat = history.reshape(len(history), layers * experts)
        lengths = np.linalg.norm(flat, axis=1)
        last = np.maximum(steps - 1, 0)
        closeness = flat[last] @ flat.T if len(flat) else np.zeros((len(steps), 0), dtype=np.float32)
        closeness = closeness / np.maximum(lengths[last][:, None] * lengths, 1e-9) if len(flat) else closeness
        weight = np.exp(self.sharpness * (closeness - 1))  # [steps, S]
        base = repeated(np.broadcast_to(self.popularity, (len(steps), layers, experts)), 1)[:, 0] * self.prior
        recent = np.where(steps[:, None] > 0, flat[last], 0) if len(flat) else np.zeros((len(steps), layers * experts))
        base = base + self.prior * recent.reshape(base.shape)
        for h in range(horizon):
            places = np.arange(max(len(flat) - 1 - h, 0))  # past steps j whose step j + 1 + h is there
            known = places[None, :] + 1 + h <= (steps - 1)[:, None]
            part = np.where(known, weight[:, : len(places)], 0)
            if favour is not None:
                part = part * favour[:, 1 : 1 + len(places)]
            followed = (part @ flat[1 + h :]).reshape(base.shape) if len(places) else np.zeros_like(base)
            scores = followed + base
            if h == 0 and first is not None:
                scores = scores + first
            out[:, h] = scores / scores.sum(axis=2, keepdims=True)
        return out


class NearestTokenStep(NearestStep):
    """As `NearestStep`, but past steps that were fed the token about to be fed count more, and the table of experts by
    token is added: what can be had without a trained network. Without tokens it is `NearestStep`."""

    name = "nearest-token"
    uses_tokens = True

    def __init__(self, sharpness: float = 7.0, same_token: float = 30.0, table_share: float = 1.5) -> None:
        super().__init__(sharpness)
        self.same_token = same_token
        self.table_share = table_share
        self._table = TokenTable()

    def fit(self, trace: Trace) -> Self:
        """See Rival. UsageError for a trace without tokens."""
        self._table.fit(trace)
        return super().fit(trace)

    def _begin(self, batch: int) -> Any:
        return super()._begin(batch), np.zeros((batch, 0), dtype=np.int64)

    def _advance(self, state: Any, activations: Scores, tokens: Tokens) -> Any:
        history, fed = state
        new = np.full(len(history), -1) if tokens is None else np.asarray(tokens)  # -1: no token is the same
        return super()._advance(history, activations, tokens), np.concatenate([fed, new[:, None]], axis=1)

    def _scores(self, state: Any, horizon: int, tokens: Tokens) -> Scores:
        history, fed = state
        if tokens is None:
            return super()._scores(history, horizon, None)
        steps = np.array([history.shape[1]])
        now = np.asarray(tokens)
        rows = [
            self._with_tokens(one, past, now[i : i + 1], steps, horizon)[0]
            for i, (one, past) in enumerate(zip(history, fed, strict=True))
        ]
        return np.stack(rows)

    def forecast_trace(self, sequence: Trace, horizon: int, with_tokens: bool) -> Scores:
        """See Predictor."""
        if not with_tokens or sequence.tokens is None:
            return super().forecast_trace(sequence, horizon, False)
        self._check_trace(sequence)
        history = psi_numpy(sequence.expert_ids, sequence.expert_weights, sequence.num_experts)
        return self._with_tokens(history, sequence.tokens, sequence.tokens, np.arange(len(history)), horizon)

    def _with_tokens(
        self,
        history: Scores,
        fed: NDArray[np.integer],
        now: NDArray[np.integer],
        steps: NDArray[np.int64],
        horizon: int,
    ) -> Scores:
        """`fed` [S]: tokens of the past steps; `now` [len(steps)]: about to be fed in each of `steps`."""
        favour = (1 + self.same_token * (now[:, None] == fed[None, :])).astype(np.float32)
        return self._of_history(history, steps, horizon, favour, self.table_share * self._table.lookup(now))


class Ridge(Rival):
    """Ridge regression of each coming step's choices on what was seen: last step, and averages that forget at given
    rates. One regression for each step ahead, up to the horizon it was fitted for: the linear reference."""

    name = "ridge"

    def __init__(self, horizon: int = 8, decays: tuple[float, ...] = (0.0, 0.7, 0.95), strength: float = 30.0) -> None:
        super().__init__()
        self.horizon = horizon
        self.decays = decays
        self.strength = strength
        self._weights: Scores = np.empty((0, 0, 0), dtype=np.float32)  # [horizon, features + 1, L * E]

    def fit(self, trace: Trace) -> Self:
        """See Rival. Takes about a minute for 90,000 steps of 768 experts."""
        super().fit(trace)
        layers, experts = trace.num_layers, trace.num_experts
        width = len(self.decays) * layers * experts + 1
        square = np.zeros((width, width))
        cross = np.zeros((self.horizon, width, layers * experts))
        for i in range(trace.num_sequences):
            sequence = trace.sequence(i)
            activations = psi_numpy(sequence.expert_ids, sequence.expert_weights, experts)
            features = self._features(self._states(activations, None))[1:]
            chosen = (activations > 0).reshape(len(activations), -1).astype(np.float32)[1:]
            square += features.T @ features
            for h in range(min(self.horizon, len(chosen))):
                cross[h] += features[: len(features) - h].T @ chosen[h:]
        square[np.diag_indices(width)] += self.strength
        solved = np.linalg.solve(square, cross.transpose(1, 0, 2).reshape(width, -1))
        self._weights = np.ascontiguousarray(
            solved.reshape(width, self.horizon, -1).transpose(1, 0, 2), dtype=np.float32
        )
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the weights of one step ahead."""
        return self._weights[0].nbytes if len(self._weights) else 0

    def _begin(self, batch: int) -> Any:
        return np.zeros((batch, len(self.decays), *self.popularity.shape), dtype=np.float32)

    def _advance(self, state: Any, activations: Scores, tokens: Tokens) -> Any:
        keep = np.array(self.decays, dtype=np.float32)[:, None, None]
        return keep * state + (1 - keep) * activations[:, None]

    def _states(self, activations: Scores, tokens: Tokens) -> Any:
        states = np.zeros((len(activations), len(self.decays), *activations.shape[1:]), dtype=np.float32)
        keep = np.array(self.decays, dtype=np.float32)[:, None, None]
        for t in range(1, len(activations)):
            states[t] = keep * states[t - 1] + (1 - keep) * activations[t - 1]
        return states

    def _features(self, state: Any) -> Scores:
        flat = state.reshape(len(state), -1)
        return np.concatenate([flat, np.ones((len(flat), 1), dtype=np.float32)], axis=1)

    def _scores(self, state: Any, horizon: int, tokens: Tokens) -> Scores:
        self._check_horizon(horizon, len(self._weights))
        features = self._features(state)
        out = np.empty((len(state), horizon, *self.popularity.shape), dtype=np.float32)
        for h in range(horizon):
            out[:, h] = (features @ self._weights[h]).reshape(len(state), *self.popularity.shape)
        out = np.maximum(out, _FLOOR)  # a linear estimate of a probability may be below 0
        seen = (state.sum(axis=(1, 2, 3)) > 0)[:, None, None, None]
        return np.where(seen, out / out.sum(axis=3, keepdims=True), self.popularity)
