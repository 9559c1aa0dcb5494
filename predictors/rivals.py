"""The simple rivals of the seq2seq predictor: last step, popularity, within the sequence, token table, oracle.

Each is a `Predictor` (protocol.py) made of three parts that serve step by step and whole traces alike: what is kept of
the past (`_begin`, `_advance`), the same for all steps of a trace at once (`_states`), and scores from it (`_scores`).
Loads without torch.
"""

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from seqmoe.predictors.psi import psi_numpy
from seqmoe.predictors.trace import Trace
from seqmoe.profiles.errors import UsageError

Tokens = NDArray[np.integer] | None
Scores = NDArray[np.float32]

_REST = 1e-3  # how much of a score is popularity, where the rest alone would leave experts unranked


class Rival:
    """Base of the rivals: popularity of the training trace as the prior, and the protocol in terms of states."""

    name = ""
    uses_tokens = False
    needs_fit = True

    def __init__(self) -> None:
        self.popularity: Scores = np.empty((0, 0), dtype=np.float32)  # [L, E], sum 1 per layer
        self._state: Any = None

    def fit(self, trace: Trace) -> Self:
        """Learns from a training trace; returns itself."""
        counts = trace.popularity().reshape(trace.num_layers, trace.num_experts) + 0.5
        self.popularity = (counts / counts.sum(axis=1, keepdims=True)).astype(np.float32)
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the tables that a forecast reads."""
        return self.popularity.nbytes

    def start(self, batch: int) -> None:
        """See Predictor."""
        self._check_fitted()
        self._state = self._begin(batch)

    def observe(self, activations: Scores, tokens: Tokens = None) -> None:
        """See Predictor."""
        self._state = self._advance(self._state, np.asarray(activations, dtype=np.float32), tokens)

    def forecast(self, horizon: int, tokens: Tokens = None) -> Scores:
        """See Predictor."""
        return self._scores(self._state, horizon, tokens)

    def forecast_trace(self, sequence: Trace, horizon: int, with_tokens: bool) -> Scores:
        """See Predictor. UsageError for a trace of another shape than the one this was fitted on."""
        self._check_trace(sequence)
        activations = psi_numpy(sequence.expert_ids, sequence.expert_weights, sequence.num_experts)
        tokens = sequence.tokens if with_tokens else None
        return self._scores(self._states(activations, tokens), horizon, tokens)

    def _check_fitted(self) -> None:
        if not self.popularity.size:
            raise UsageError(f"predictor {self.name} must be fitted to a training trace first")

    def _check_trace(self, sequence: Trace) -> None:
        self._check_fitted()
        shape = (sequence.num_layers, sequence.num_experts)
        if self.popularity.shape != shape:
            got = list(self.popularity.shape)
            raise UsageError(
                f"predictor {self.name} has [layers, experts] = {got}, expected {list(shape)} as the trace"
            )

    def _check_horizon(self, horizon: int, fitted: int) -> None:
        if horizon > fitted:
            raise UsageError(f"predictor {self.name} was fitted for {fitted} steps ahead, {horizon} were asked for")

    def _begin(self, batch: int) -> Any:
        """What is known before the first step: zeros [b, L, E] here."""
        return np.zeros((batch, *self.popularity.shape), dtype=np.float32)

    def _advance(self, state: Any, activations: Scores, tokens: Tokens) -> Any:
        """The state after one more step; must not change `state` in place."""
        return activations

    def _states(self, activations: Scores, tokens: Tokens) -> Any:
        """The states before each step of one sequence's Psi [S, L, E], as a batch of S."""
        return shifted(activations)

    def _scores(self, state: Any, horizon: int, tokens: Tokens) -> Scores:
        """[b, horizon, L, E] from a batch of states."""
        raise NotImplementedError


def shifted(activations: Scores) -> Scores:
    """Row t is what the step before t chose, row 0 is zero."""
    before = np.zeros_like(activations)
    before[1:] = activations[:-1]
    return before


def repeated(scores: Scores, horizon: int) -> Scores:
    """[b, L, E] -> [b, horizon, L, E], the same for every step ahead (a read-only view)."""
    batch, layers, experts = scores.shape
    return np.broadcast_to(scores[:, None], (batch, horizon, layers, experts))


class Popularity(Rival):
    """The experts that the training trace used most, whatever happens."""

    name = "popularity"

    def _scores(self, state: Any, horizon: int, tokens: Tokens) -> Scores:
        return repeated(np.broadcast_to(self.popularity, state.shape), horizon)


class LastStep(Rival):
    """What the last step chose, for every step ahead; popularity ranks the others."""

    name = "last"

    def _scores(self, state: Any, horizon: int, tokens: Tokens) -> Scores:
        seen = state.sum(axis=2, keepdims=True) > 0
        return repeated(np.where(seen, (1 - _REST) * state + _REST * self.popularity, self.popularity), horizon)


class WithinSequence(Rival):
    """How often the sequence itself has used an expert, starting from popularity: the paper's control, without order."""

    name = "within"

    def __init__(self, prior_steps: float = 8.0) -> None:
        super().__init__()
        self.prior_steps = prior_steps

    def _advance(self, state: Any, activations: Scores, tokens: Tokens) -> Any:
        return state + _hits(activations)

    def _states(self, activations: Scores, tokens: Tokens) -> Any:
        return np.cumsum(shifted(_hits(activations)), axis=0, dtype=np.float32)

    def _scores(self, state: Any, horizon: int, tokens: Tokens) -> Scores:
        counts = state + self.prior_steps * self.popularity
        return repeated(counts / counts.sum(axis=2, keepdims=True), horizon)


class TokenTable(Rival):
    """Which experts the training trace used for the token about to be fed; popularity for tokens it has not seen, and
    for steps whose token is not known yet."""

    name = "token"
    uses_tokens = True

    def __init__(self, prior_uses: float = 1.0) -> None:
        super().__init__()
        self.prior_uses = prior_uses
        self._ids: NDArray[np.int32] = np.empty(0, dtype=np.int32)  # tokens of the training trace, ascending
        self._table: Scores = np.empty((0, 0, 0), dtype=np.float32)  # [tokens, L, E]

    def fit(self, trace: Trace) -> Self:
        """See Rival. UsageError for a trace without tokens."""
        super().fit(trace)
        if trace.tokens is None:
            raise UsageError(f"predictor {self.name} needs a trace with tokens, this one has none")
        self._ids, row = np.unique(trace.tokens, return_inverse=True)
        size = len(self._ids) * trace.num_experts
        shape = (len(self._ids), trace.num_experts)
        self._table = np.empty((len(self._ids), trace.num_layers, trace.num_experts), dtype=np.float32)
        uses = np.bincount(row)[:, None]
        for layer in range(trace.num_layers):
            flat = (row[:, None] * trace.num_experts + trace.expert_ids[:, layer]).ravel()
            counts = np.bincount(flat, minlength=size).reshape(shape) / trace.top_k
            self._table[:, layer] = (counts + self.prior_uses * self.popularity[layer]) / (uses + self.prior_uses)
        return self

    @property
    def nbytes(self) -> int:
        """Bytes that one forecast reads: a row of the table."""
        return self.popularity.nbytes

    @property
    def table_bytes(self) -> int:
        """Bytes of the whole table."""
        return self._table.nbytes

    def lookup(self, tokens: NDArray[np.integer]) -> Scores:
        """Scores [b, L, E] of the step that is fed `tokens` [b]."""
        at = np.minimum(np.searchsorted(self._ids, tokens), len(self._ids) - 1)
        known = self._ids[at] == tokens
        return np.where(known[:, None, None], self._table[at], self.popularity)

    def _scores(self, state: Any, horizon: int, tokens: Tokens) -> Scores:
        scores = np.array(repeated(np.broadcast_to(self.popularity, state.shape), horizon))
        if tokens is not None:
            scores[:, 0] = self.lookup(np.asarray(tokens))
        return scores


class Oracle(Rival):
    """Reads the coming steps from the trace: what a perfect predictor would give. Sequence i of `future` is row i of
    the batch; `forecast_trace` takes the sequence itself. Past the end: all experts alike."""

    name = "oracle"
    needs_fit = False

    def __init__(self, future: Trace | None = None) -> None:
        super().__init__()
        self._future = future
        self._step = 0

    def start(self, batch: int) -> None:
        """See Predictor. UsageError when the future is not known, or has fewer sequences."""
        if self._future is None or batch > self._future.num_sequences:
            raise UsageError(f"the oracle needs the future of {batch} sequences")
        self._step = 0
        self._state = [self._rows(self._future.sequence(i)) for i in range(batch)]

    def observe(self, activations: Scores, tokens: Tokens = None) -> None:
        """See Predictor."""
        self._step += 1

    def forecast(self, horizon: int, tokens: Tokens = None) -> Scores:
        """See Predictor."""
        return np.stack([_ahead(rows, horizon, np.array([self._step]))[0] for rows in self._state])

    def forecast_trace(self, sequence: Trace, horizon: int, with_tokens: bool) -> Scores:
        """See Predictor, except that row t is steps t to t + horizon - 1 themselves."""
        return _ahead(self._rows(sequence), horizon, np.arange(sequence.num_steps))

    @staticmethod
    def _rows(sequence: Trace) -> Scores:
        return psi_numpy(sequence.expert_ids, sequence.expert_weights, sequence.num_experts)


def _ahead(activations: Scores, horizon: int, steps: NDArray[np.int64]) -> Scores:
    last = len(activations)
    even = np.full((1, *activations.shape[1:]), 1 / activations.shape[2], dtype=np.float32)
    rows = np.minimum(steps[:, None] + np.arange(horizon), last)
    return np.concatenate([activations, even])[rows]


def _hits(activations: Scores) -> Scores:
    """1/k for each chosen expert, however it was weighted."""
    chosen = activations > 0
    return (chosen / chosen.sum(axis=-1, keepdims=True)).astype(np.float32)
