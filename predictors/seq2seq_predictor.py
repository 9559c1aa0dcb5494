"""The trained sequence predictor behind the `Predictor` protocol: observe, one step, recursion with the state restored."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from seqmoe.predictors.batches import Steps, Vocabulary, assemble, whole_sequences
from seqmoe.predictors.mamba2 import Mamba2State
from seqmoe.predictors.psi import psi_numpy, softmax
from seqmoe.predictors.seq2seq import GroupNet, NetState, Seq2SeqNet
from seqmoe.predictors.seq2seq_file import PredictorInfo, load_predictor
from seqmoe.predictors.seq2seq_step import KEPT_STEPS, FastStep
from seqmoe.predictors.trace import Trace
from seqmoe.profiles.errors import UsageError

Array = NDArray[np.float32]


class Stepper(Protocol):
    """One group's recurrent step. A state is never changed: whoever keeps it can go back to it."""

    nbytes: int

    def start(self, batch: int) -> Any:
        """The state of sequences that have seen nothing."""

    def step(self, psi: Array, rows: NDArray[np.int64] | None, state: Any) -> tuple[Array, Any]:
        """Psi of the step before, token rows [b] or None -> (logits [b, n, E], state after)."""

    def recurse(self, psi: Array, state: Any) -> tuple[Array, Any]:
        """One step further, fed what was forecast -> (logits [b, n, E], state after)."""

    def feed_back(self, logits: Array) -> Array:
        """The next input in recursion, [b, n, E]."""

    def stack(self, states: list[Any]) -> Any:
        """States of one sequence each, as one state of them all."""


class TorchStep:
    """A group's network as it is."""

    def __init__(self, net: GroupNet) -> None:
        self.net = net
        self.nbytes = sum(p.numel() * p.element_size() for p in net.parameters())

    def start(self, batch: int) -> NetState:
        """The state of sequences that have seen nothing."""
        return self.net.start(batch)

    @torch.inference_mode()
    def step(self, psi: Array, rows: NDArray[np.int64] | None, state: NetState) -> tuple[Array, NetState]:
        """Psi of the step before, token rows [b] or None -> (logits [b, n, E], state after)."""
        device = self.net.recursed.device
        given = None if rows is None else torch.from_numpy(rows).to(device)
        logits, after = self.net.step(torch.tensor(psi, device=device), given, state)
        return logits.float().cpu().numpy(), after

    @torch.inference_mode()
    def recurse(self, psi: Array, state: NetState) -> tuple[Array, NetState]:
        """One step further, fed what was forecast -> (logits [b, n, E], state after)."""
        logits, after = self.net.recurse(torch.tensor(psi, device=self.net.recursed.device), state)
        return logits.float().cpu().numpy(), after

    @torch.inference_mode()
    def feed_back(self, logits: Array) -> Array:
        """The next input in recursion, [b, n, E]."""
        return self.net.feed_back(torch.from_numpy(logits)).numpy()

    def stack(self, states: list[NetState]) -> NetState:
        """States of one sequence each, as one state of them all."""
        blocks = tuple(
            Mamba2State(torch.cat([s.conv for s in parts]), torch.cat([s.ssm for s in parts]))
            for parts in zip(*(state.blocks for state in states), strict=True)
        )
        return NetState(
            torch.cat([state.memory for state in states]),
            torch.cat([state.tokens for state in states]),
            torch.cat([state.filled for state in states]),
            torch.cat([state.fed for state in states]),
            torch.cat([state.means for state in states]),
            torch.cat([state.weights for state in states]),
            torch.cat([state.ahead for state in states]),
            blocks,
        )


class GroupPredictor:
    """The layers [first, last) of a running batch of sequences."""

    def __init__(self, stepper: Stepper, first: int, last: int, num_experts: int) -> None:
        self.stepper, self.first, self.last, self.num_experts = stepper, first, last, num_experts
        self.start(1)

    def start(self, batch: int) -> None:
        """Forget everything: `batch` new sequences begin."""
        self._state = self.stepper.start(batch)  # has consumed all but `_seen`
        self._seen: Array = np.zeros((batch, self.last - self.first, self.num_experts), dtype=np.float32)
        self._done: tuple[NDArray[np.int64] | None, Array, Any] | None = None

    def observe(self, activations: Array, rows: NDArray[np.int64] | None) -> None:
        """A step has run: Psi [b, n, E] of these layers, and the rows of the tokens that were fed in it."""
        if activations.shape != self._seen.shape:
            raise UsageError(f"activations must have shape {list(self._seen.shape)}, got {list(activations.shape)}")
        _, self._state = self._advance(rows)
        self._seen, self._done = np.array(activations, dtype=np.float32), None

    def forecast(self, horizon: int, rows: NDArray[np.int64] | None) -> Array:
        """Logits [b, horizon, n, E] from the step that comes next on. The state stays as it is."""
        logits, state = self._advance(rows)
        out = [logits]
        for _ in range(horizon - 1):
            logits, state = self.stepper.recurse(self.stepper.feed_back(logits), state)
            out.append(logits)
        return np.stack(out, axis=1)

    def _advance(self, rows: NDArray[np.int64] | None) -> tuple[Array, Any]:
        """The step that comes next, kept so that observing what was forecast costs nothing more."""
        if self._done is not None:
            known, logits, state = self._done
            if known is rows or (known is not None and rows is not None and np.array_equal(known, rows)):
                return logits, state
        logits, state = self.stepper.step(self._seen, rows, self._state)
        self._done = (rows, logits, state)
        return logits, state


class Seq2SeqPredictor:
    """All groups of a split as one predictor of whole steps (see protocol.Predictor)."""

    name = "seq2seq"

    def __init__(
        self,
        net: Seq2SeqNet,
        vocabulary: Vocabulary | None,
        info: PredictorInfo | None = None,
        fast: bool | None = None,
    ) -> None:
        """`fast`: int8 weights and one compiled call a step (default: on the CPU)."""
        self.net, self.vocabulary, self.info = net.eval(), vocabulary, info or PredictorInfo()
        self.config = net.config
        self.uses_tokens = net.config.uses_tokens
        if fast is None:
            fast = next(net.parameters()).device.type == "cpu"
        self.groups: Sequence[GroupPredictor] = [
            GroupPredictor(FastStep(part) if fast else TorchStep(part), part.first, part.last, net.config.num_experts)
            for part in net.nets()
        ]
        self.nbytes = sum(group.stepper.nbytes for group in self.groups)

    @classmethod
    def load(cls, folder: str | Path, device: str = "cpu", fast: bool | None = None) -> "Seq2SeqPredictor":
        """From the folder that `seqmoe train` wrote. CheckpointError naming file and field for a bad one."""
        saved = load_predictor(Path(folder), device)
        return cls(saved.net, saved.vocabulary, saved.info, fast)

    def start(self, batch: int) -> None:
        """Forget everything: `batch` new sequences begin."""
        for group in self.groups:
            group.start(batch)

    def observe(self, activations: Array, tokens: NDArray[np.integer] | None = None) -> None:
        """A step has run: its Psi [b, L, E] and the tokens [b] that were fed in it, where they are known."""
        rows = self.rows(tokens)
        for group in self.groups:
            group.observe(activations[:, group.first : group.last], rows)

    def prefill(self, activations: Array, tokens: NDArray[np.integer] | None = None) -> None:
        """A prompt has run: its Psi [b, S, L, E] and the tokens [b, S] that were fed, where they are known. Afterwards
        `forecast` is for the first step after the prompt."""
        for step in range(activations.shape[1]):
            self.observe(activations[:, step], None if tokens is None else tokens[:, step])

    def forecast(self, horizon: int, tokens: NDArray[np.integer] | None = None) -> Array:
        """Scores [b, horizon, L, E] that sum to 1 over the experts. Changes no state."""
        if horizon < 1:
            raise UsageError(f"horizon must be at least 1, got {horizon}")
        rows = self.rows(tokens)
        return softmax(np.concatenate([group.forecast(horizon, rows) for group in self.groups], axis=2))

    def rows(self, tokens: NDArray[np.integer] | None) -> NDArray[np.int64] | None:
        """Embedding rows of token ids; None without tokens, or where this predictor does not use them."""
        return None if tokens is None or self.vocabulary is None else self.vocabulary.lookup(np.asarray(tokens))

    def forecast_trace(self, sequence: Trace, horizon: int, with_tokens: bool) -> Array:
        """Scores [S, horizon, L, E]: row t knows the steps before t (and tokens up to t's, `with_tokens`)."""
        self._check(sequence)
        psi = psi_numpy(sequence.expert_ids, sequence.expert_weights, sequence.num_experts)
        shifted = np.concatenate([np.zeros_like(psi[:1]), psi[:-1]])
        rows = self.rows(sequence.tokens) if with_tokens else None
        parts = [_trace_logits(group, shifted[:, group.first : group.last], rows, horizon) for group in self.groups]
        return softmax(np.concatenate(parts, axis=2))

    @torch.inference_mode()
    def forecast_many(self, trace: Trace, with_tokens: bool, most_steps: int = 8192) -> Array:
        """One step ahead for all sequences of a trace at once, by the parallel scan in float32: [S, L, E]."""
        self._check(trace)
        steps = Steps.of(trace, self.vocabulary if with_tokens and trace.tokens is not None else None)
        out = np.zeros((trace.num_steps, trace.num_layers, trace.num_experts), dtype=np.float32)
        device = next(self.net.parameters()).device
        for pieces in whole_sequences(steps, most_steps):
            batch = assemble(steps, pieces, max(row[0][1] for row in pieces)).to(device)
            logits = []
            for net in self.net.nets():
                history = net.history(batch.psi[:, :, net.first : net.last], batch.rows, batch.segments)
                logits.append(net(history, batch.rows, batch.segments))
            scores = torch.cat(logits, dim=2).softmax(-1).cpu().numpy()
            for row, ((first, count, _),) in enumerate(pieces):
                out[first : first + count] = scores[row, :count]
        return out

    def _check(self, trace: Trace) -> None:
        config = self.config
        for field in ("num_layers", "num_experts", "top_k"):
            if getattr(trace, field) != getattr(config, field):
                raise UsageError(
                    f"the trace has {field} {getattr(trace, field)}, the predictor was made for {getattr(config, field)}"
                )
        trace.check_model(self.info.model_digest or "", config.num_layers, config.num_experts, config.top_k)


def _trace_logits(group: GroupPredictor, shifted: Array, rows: NDArray[np.int64] | None, horizon: int) -> Array:
    """[S, horizon, n, E]: one step after another, then recursion from many of them at a time."""
    stepper, steps = group.stepper, len(shifted)
    out = np.empty((steps, horizon, *shifted.shape[1:]), dtype=np.float32)
    state = stepper.start(1)
    for begin in range(0, steps, KEPT_STEPS):
        end, states = min(begin + KEPT_STEPS, steps), []
        for t in range(begin, end):
            given = None if rows is None else rows[t : t + 1]
            logits, state = stepper.step(shifted[t : t + 1], given, state)
            out[t, 0] = logits[0]
            states.append(state)
        if horizon > 1:
            ahead, logits = stepper.stack(states), out[begin:end, 0]
            for h in range(1, horizon):
                logits, ahead = stepper.recurse(stepper.feed_back(logits), ahead)
                out[begin:end, h] = logits
    return out
