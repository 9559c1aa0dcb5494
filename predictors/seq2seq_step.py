"""The fast decode step on the CPU: int8 weights, one compiled call for a group's whole network.

A step reads every weight once and does little else, so time is bytes: 8 bits with one scale for each output feature are
a quarter of float32. Activations and states stay float32. `GroupNet.step` is the reference.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from seqmoe.predictors.seq2seq import NO_TOKEN, GroupNet
from seqmoe.predictors.seq2seq_features import SLACK

Array = NDArray[np.float32]
KEPT_STEPS = 128  # that the memory holds beyond its window


class Memory(NamedTuple):
    """Steps that sequences have seen, the chosen experts only; step p is at p % C, C = window + 1 + KEPT_STEPS.

    Written in place and shared by the states of a run: a state stays good for KEPT_STEPS steps after it.
    """

    places: NDArray[np.uint16]  # [b, C, n * k], place among the n * E
    root: Array  # [b, C, n * k], root of Psi there
    token: NDArray[np.int64]  # [b, C], row of the token that was fed


class FastState(NamedTuple):
    """State of b sequences; all but the memory is never changed."""

    conv: Array  # [b, blocks, d_conv - 1, channels], last inputs of the convolution, oldest first
    ssm: Array  # [b, blocks, d_inner, d_state]
    means: Array  # [b, decays, m], running means after the input layer
    memory: Memory  # its b may be 1: all sequences are then prefixes of one
    filled: NDArray[np.int64]  # [b], steps in the memory, -1 before the first
    fed: NDArray[np.int64]  # [b], row of the token fed in the step that was forecast last
    weights: Array  # [b, C, matches], of the steps in the memory
    ahead: int  # recursions since the last step with news


class _Weights(NamedTuple):
    """A group's weights; leading dimension of block_norm to out_scale: blocks."""

    sparse: NDArray[np.int8]  # [1 + decays, features, m]: a column of the input layer a row, few of which are read
    sparse_scale: Array  # [1 + decays, m]
    dense: NDArray[np.int8]  # [m, features * matches], for the matches, which are side by side for each feature
    dense_scale: Array  # [m]
    input_bias: Array  # [m]
    recursed: Array  # [m]
    token: NDArray[np.int8]  # [rows, m], the token table's part of the input layer included
    token_scale: Array  # [rows]
    decays: Array
    betas: Array
    block_norm: Array  # [blocks, m]
    in_proj: NDArray[np.int8]  # [blocks, out, m]
    in_scale: Array  # [blocks, out]
    conv: Array  # [blocks, d_conv, channels]
    conv_bias: Array  # [blocks, channels]
    dt_bias: Array  # [blocks, h]
    a: Array  # [blocks, h], negative
    d: Array  # [blocks, h]
    gate_norm: Array  # [blocks, d_inner]
    out_proj: NDArray[np.int8]  # [blocks, m, d_inner]
    out_scale: Array  # [blocks, m]
    norm: Array  # [m]
    output: NDArray[np.int8]  # [features, m]
    output_scale: Array  # [features]
    output_bias: Array  # [features]


class FastStep:
    """A group's network for decode; see `seq2seq_predictor.Stepper`."""

    def __init__(self, net: GroupNet) -> None:
        self.config, self.layers = net.config, net.layers
        self.weights = _pack(net)
        self.nbytes = sum(part.nbytes for part in self.weights)

    def start(self, batch: int) -> FastState:
        """The state of sequences that have seen nothing."""
        w, c = self.weights, self.config
        blocks, channels = w.conv_bias.shape
        slots, chosen = c.window + 1 + KEPT_STEPS, self.layers * c.top_k
        memory = Memory(
            np.zeros((batch, slots, chosen), dtype=np.uint16),
            np.zeros((batch, slots, chosen), dtype=np.float32),
            np.zeros((batch, slots), dtype=np.int64),
        )
        return FastState(
            np.zeros((batch, blocks, c.d_conv - 1, channels), dtype=np.float32),
            np.zeros((batch, blocks, w.out_proj.shape[2], c.d_state), dtype=np.float32),
            np.zeros((batch, len(w.decays), c.hidden), dtype=np.float32),
            memory,
            np.full(batch, -1, dtype=np.int64),
            np.full(batch, NO_TOKEN, dtype=np.int64),
            np.zeros((batch, slots, c.features.matches(c.uses_tokens)), dtype=np.float32),
            0,
        )

    def step(self, psi: Array, rows: NDArray[np.int64] | None, state: FastState) -> tuple[Array, FastState]:
        """Psi of the step before [b, n, E], token rows [b] or None -> (logits [b, n, E], state after)."""
        c = self.config
        if rows is None:
            rows = np.full(len(psi), NO_TOKEN, dtype=np.int64)
        roots = _roots(psi)
        weights = np.empty_like(state.weights)
        spec = c.features
        for b in range(len(psi)):
            m = b % len(state.memory.token)
            memory = (state.memory.places[m], state.memory.root[m], state.memory.token[m])
            if state.filled[b] >= 0:
                _remember(roots[b], c.top_k, c.num_experts, state.filled[b], state.fed[b], *memory)
            token_beta, token_weight = (spec.token_beta, spec.token_weight) if c.uses_tokens else (0.0, 0.0)
            _weigh(
                roots[b], self.layers, self.weights.betas, token_beta, token_weight, rows[b],
                state.filled[b] + 1, c.window, *memory, weights[b],
            )  # fmt: skip
        after = state._replace(filled=state.filled + 1, fed=rows, weights=weights, ahead=0)
        return self._advance(roots, rows, after, False)

    def recurse(self, psi: Array, state: FastState) -> tuple[Array, FastState]:
        """One step further, fed what was forecast: [b, n, E] -> (logits [b, n, E], state after)."""
        rows = np.full(len(psi), NO_TOKEN, dtype=np.int64)
        return self._advance(_roots(psi), rows, state._replace(ahead=state.ahead + 1), True)

    def _advance(
        self, roots: Array, rows: NDArray[np.int64], state: FastState, recursed: bool
    ) -> tuple[Array, FastState]:
        after = state._replace(
            conv=np.empty_like(state.conv), ssm=np.empty_like(state.ssm), means=np.empty_like(state.means)
        )
        logits = np.empty((len(roots), self.layers, self.config.num_experts), dtype=np.float32)
        for b in range(len(roots)):
            m = b % len(state.memory.token)
            _step_row(
                self.weights, roots[b], rows[b], recursed, state.memory.places[m], state.memory.root[m], state.weights[b],
                state.filled[b], state.ahead, (state.conv[b], state.ssm[b], state.means[b]),
                (after.conv[b], after.ssm[b], after.means[b]), logits[b].reshape(-1),
            )  # fmt: skip
        return logits, after

    def feed_back(self, logits: Array) -> Array:
        """The next input in recursion, [b, n, E]."""
        out = np.zeros(logits.shape, dtype=np.float32)
        _feed_back(logits.reshape(-1, logits.shape[-1]), self._kept(), out.reshape(-1, logits.shape[-1]))
        return out

    def _kept(self) -> int:
        return self.config.top_k if self.config.feedback == "psi" else self.config.num_experts

    @staticmethod
    def stack(states: list[FastState]) -> FastState:
        """States of one sequence each, all of one run, as one state of them all."""
        return FastState(
            np.concatenate([state.conv for state in states]),
            np.concatenate([state.ssm for state in states]),
            np.concatenate([state.means for state in states]),
            states[0].memory,
            np.concatenate([state.filled for state in states]),
            np.concatenate([state.fed for state in states]),
            np.concatenate([state.weights for state in states]),
            states[0].ahead,
        )


def _pack(net: GroupNet) -> _Weights:
    blocks, spec = net.mixers(), net.spec
    uses_tokens = net.token is not None

    def stacked(values: list[torch.Tensor]) -> Array:
        return np.ascontiguousarray(torch.stack([v.detach().cpu().float() for v in values]).numpy())

    m, size = net.config.hidden, net.layers * net.config.num_experts
    inputs = _array(net.input.weight).reshape(m, -1, size)  # [m, D, features]
    sparse, sparse_scale = _quantise(np.ascontiguousarray(inputs[:, : spec.first_match].transpose(1, 0, 2)))
    matches = inputs[:, spec.first_match : spec.first_match + spec.matches(uses_tokens)]
    dense, dense_scale = _quantise(np.ascontiguousarray(matches.transpose(0, 2, 1)).reshape(m, -1))
    output, output_scale = _quantise(_array(net.output.weight))
    in_proj, in_scale = _quantise(stacked([b.mixer.in_proj.weight for b in blocks]))
    out_proj, out_scale = _quantise(stacked([b.mixer.out_proj.weight for b in blocks]))
    if net.token is not None and net.table is not None:
        token, token_scale = _quantise(_array(net.token.weight) + _array(net.table) @ inputs[:, -1].T)
    else:
        token, token_scale = np.zeros((1, m), dtype=np.int8), np.zeros(1, dtype=np.float32)
    biases = [b.mixer.conv1d.bias for b in blocks]
    assert all(bias is not None for bias in biases)
    return _Weights(
        np.ascontiguousarray(sparse.transpose(0, 2, 1)),
        sparse_scale,
        dense,
        dense_scale,
        _array(net.input.bias),
        _array(net.recursed),
        token,
        token_scale,
        np.array(spec.decays, dtype=np.float32),
        np.array(spec.betas, dtype=np.float32),
        stacked([b.norm.weight for b in blocks]),
        in_proj,
        in_scale,
        stacked([b.mixer.conv1d.weight.squeeze(1).T for b in blocks]),
        stacked([bias for bias in biases if bias is not None]),
        stacked([b.mixer.dt_bias for b in blocks]),
        stacked([-torch.exp(b.mixer.A_log) for b in blocks]),
        stacked([b.mixer.D for b in blocks]),
        stacked([b.mixer.norm.weight for b in blocks]),
        out_proj,
        out_scale,
        _array(net.norm.weight),
        output,
        output_scale,
        _array(net.output.bias),
    )


def _array(value: torch.Tensor) -> Array:
    return np.ascontiguousarray(value.detach().cpu().float().numpy())


def _roots(psi: Array) -> Array:
    return np.sqrt(psi, dtype=np.float32).reshape(len(psi), -1)


def _quantise(weight: Array) -> tuple[NDArray[np.int8], Array]:
    """Rows [..., out, in] as int8 and one scale for each of them: the value is int8 * scale."""
    scale = np.maximum(np.abs(weight).max(axis=-1), 1e-12) / np.float32(127)
    return np.rint(weight / scale[..., None]).astype(np.int8), scale.astype(np.float32)


@njit(cache=True, nogil=True)
def _remember(root, k, experts, count, fed, index, kept, token):  # type: ignore[no-untyped-def]
    """Writes the step with the roots [features] to the memory's slot count % C; at most k experts of a layer count."""
    slot = count % index.shape[0]
    token[slot] = fed
    index[slot] = 0
    kept[slot] = 0
    for layer in range(root.shape[0] // experts):
        found = 0
        for e in range(layer * experts, (layer + 1) * experts):
            if root[e] > 0 and found < k:
                index[slot, layer * k + found], kept[slot, layer * k + found] = e, root[e]
                found += 1


@njit(cache=True, nogil=True, fastmath=True)
def _weigh(root, layers, betas, token_beta, token_weight, row, count, window, index, kept, token, out):  # type: ignore[no-untyped-def]
    """How much each step of the memory counts for each match: out [C, matches], 0 for those out of the window."""
    slots = index.shape[0]
    out[:] = 0
    for p in range(max(0, count - window), count):
        cosine = np.float32(0.0)
        if p > 0:  # a step is compared by the one before it
            before = (p - 1) % slots
            places, values = index[before], kept[before]
            for i in range(places.shape[0]):
                cosine += root[places[i]] * values[i]
        far = cosine / np.float32(layers) - np.float32(1.0)
        weight = out[p % slots]
        for j in range(betas.shape[0]):
            weight[j] = math.exp(betas[j] * far)
        if token_beta > 0:
            factor = token_weight + 1 if row > 0 and token[p % slots] == row else 1.0
            weight[betas.shape[0]] = math.exp(np.float32(token_beta) * far) * np.float32(factor)


@njit(cache=True, nogil=True, fastmath=True)
def _match(index, kept, weights, count, ahead, out):  # type: ignore[no-untyped-def]
    """What followed the weighted steps, `ahead` steps further: out [features, matches]."""
    slots, matches = weights.shape
    first, second = np.empty(out.shape[0], dtype=np.float32), np.empty(out.shape[0], dtype=np.float32)
    for begin in range(0, matches, 2):  # two matches at a time
        other = min(begin + 1, matches - 1)
        first[:] = 0
        second[:] = 0
        total0 = total1 = np.float32(0.0)
        for p in range(max(0, count - slots), count - ahead):
            w0, w1 = weights[p % slots, begin], weights[p % slots, other]
            if max(w0, w1) < 1e-7:
                continue
            total0 += w0
            total1 += w1
            later = (p + ahead) % slots
            places, values = index[later], kept[later]
            for i in range(places.shape[0]):
                at, value = places[i], values[i]
                first[at] += w0 * value
                second[at] += w1 * value
        total0 = np.float32(1.0) / (total0 + np.float32(SLACK))
        total1 = np.float32(1.0) / (total1 + np.float32(SLACK))
        for f in range(out.shape[0]):
            out[f, begin] = first[f] * total0
            out[f, other] = second[f] * total1


@njit(cache=True, nogil=True, fastmath=True, inline="always")
def _sigmoid(x):  # type: ignore[no-untyped-def]
    return np.float32(1.0) / (np.float32(1.0) + math.exp(-x))


@njit(cache=True, nogil=True, fastmath=True)
def _product(weight, scale, x, out):  # type: ignore[no-untyped-def]
    """out[o] = scale[o] * sum_i weight[o, i] x[i]; four rows at a time, so that x is loaded once for them."""
    outs, size = weight.shape
    whole = outs - outs % 4
    for o in range(0, whole, 4):
        w0, w1, w2, w3 = weight[o], weight[o + 1], weight[o + 2], weight[o + 3]
        s0 = s1 = s2 = s3 = np.float32(0.0)
        for i in range(size):
            v = x[i]
            s0 += np.float32(w0[i]) * v
            s1 += np.float32(w1[i]) * v
            s2 += np.float32(w2[i]) * v
            s3 += np.float32(w3[i]) * v
        out[o], out[o + 1], out[o + 2], out[o + 3] = (
            s0 * scale[o],
            s1 * scale[o + 1],
            s2 * scale[o + 2],
            s3 * scale[o + 3],
        )
    for o in range(whole, outs):
        row, total = weight[o], np.float32(0.0)
        for i in range(size):
            total += np.float32(row[i]) * x[i]
        out[o] = total * scale[o]


@njit(cache=True, nogil=True, fastmath=True)
def _rms_norm(x, weight, out):  # type: ignore[no-untyped-def]
    total = np.float32(0.0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    factor = np.float32(1.0) / np.float32(math.sqrt(total / np.float32(x.shape[0]) + np.float32(1e-5)))
    for i in range(x.shape[0]):
        out[i] = x[i] * factor * weight[i]


@njit(cache=True, nogil=True, fastmath=True)
def _recur(x, dt, b_in, c_out, a, d, before, after, y):  # type: ignore[no-untyped-def]
    """state = exp(dt a) state + dt x B, y = state C + d x: x [d_inner], dt [h], B and C [n], state [d_inner, n]."""
    heads = dt.shape[0]
    dim, n = x.shape[0] // heads, b_in.shape[0]
    for h in range(heads):
        decay = np.float32(math.exp(dt[h] * a[h]))
        for p in range(h * dim, (h + 1) * dim):
            old, new = before[p], after[p]
            add, total = x[p] * dt[h], np.float32(0.0)
            for j in range(n):
                value = old[j] * decay + add * b_in[j]
                new[j] = value
                total += value * c_out[j]
            y[p] = total + d[h] * x[p]


@njit(cache=True, nogil=True, fastmath=True)
def _block(w, i, x, conv_before, conv_after, ssm_before, ssm_after):  # type: ignore[no-untyped-def]
    """x += Mamba2(RMSNorm(x)) of block i, for one sequence."""
    inner, heads, channels = w.gate_norm.shape[1], w.dt_bias.shape[1], w.conv.shape[2]
    n, taps = ssm_before.shape[1], w.conv.shape[1]
    normed = np.empty_like(x)
    _rms_norm(x, w.block_norm[i], normed)
    projected = np.empty(inner + channels + heads, dtype=np.float32)
    _product(w.in_proj[i], w.in_scale[i], normed, projected)
    raw, kernel, bias = projected[inner : inner + channels], w.conv[i], w.conv_bias[i]
    mixed = np.empty(channels, dtype=np.float32)
    last = kernel[taps - 1]
    for c in range(channels):
        mixed[c] = bias[c] + raw[c] * last[c]
    for t in range(taps - 1):
        old, tap = conv_before[t], kernel[t]
        for c in range(channels):
            mixed[c] += old[c] * tap[c]
        kept = conv_before[t + 1] if t < taps - 2 else raw
        new = conv_after[t]
        for c in range(channels):
            new[c] = kept[c]
    for c in range(channels):
        mixed[c] = mixed[c] * _sigmoid(mixed[c])
    dt = np.empty(heads, dtype=np.float32)
    for h in range(heads):
        value = projected[inner + channels + h] + w.dt_bias[i, h]
        dt[h] = value if value > 20 else math.log1p(math.exp(value))
    y = np.empty(inner, dtype=np.float32)
    _recur(mixed[:inner], dt, mixed[inner : inner + n], mixed[inner + n :], w.a[i], w.d[i], ssm_before, ssm_after, y)
    for j in range(inner):
        y[j] *= projected[j] * _sigmoid(projected[j])
    gated = np.empty_like(y)
    _rms_norm(y, w.gate_norm[i], gated)
    added = np.empty_like(x)
    _product(w.out_proj[i], w.out_scale[i], gated, added)
    for j in range(x.shape[0]):
        x[j] += added[j]


@njit(cache=True, nogil=True, fastmath=True)
def _step_row(w, root, row, recursed, index, kept, weights, count, ahead, before, after, out):  # type: ignore[no-untyped-def]
    """`GroupNet.step` or `GroupNet.recurse` of one sequence: out [features] are the logits."""
    conv_before, ssm_before, means_before = before
    conv_after, ssm_after, means_after = after
    features, m = w.sparse.shape[1:]
    x, part = np.empty(m, dtype=np.float32), np.empty(m, dtype=np.float32)
    matches = np.empty((features, weights.shape[1]), dtype=np.float32)
    _match(index, kept, weights, count, ahead, matches)
    _product(w.dense, w.dense_scale, matches.reshape(matches.size), x)
    token, scale = w.token[row], w.token_scale[row]
    for j in range(m):
        x[j] += w.input_bias[j] + np.float32(token[j]) * scale
    if recursed:
        for j in range(m):
            x[j] += w.recursed[j]
    for d in range(w.sparse.shape[0]):  # the last step itself, then the running means
        part[:] = 0
        for f in range(features):
            if root[f] > 0:  # few are: the chosen of each layer
                factor, column = root[f], w.sparse[d, f]
                for j in range(m):
                    part[j] += factor * np.float32(column[j])
        for j in range(m):
            part[j] *= w.sparse_scale[d, j]
        if d > 0:  # a mean of inputs and then the input layer, or the other way round, is the same
            decay = w.decays[d - 1]
            old, new = means_before[d - 1], means_after[d - 1]
            for j in range(m):
                new[j] = decay * old[j] + (np.float32(1.0) - decay) * part[j]
                part[j] = new[j]
        for j in range(m):
            x[j] += part[j]
    for i in range(w.block_norm.shape[0]):
        _block(w, i, x, conv_before[i], conv_after[i], ssm_before[i], ssm_after[i])
    _rms_norm(x, w.norm, part)
    _product(w.output, w.output_scale, part, out)
    for f in range(features):
        out[f] += w.output_bias[f]


@njit(cache=True, nogil=True, fastmath=True)
def _feed_back(logits, kept, out):  # type: ignore[no-untyped-def]
    """Softmax of each row, the best `kept` of it renormalised, zero elsewhere: [rows, E] -> the same."""
    experts = logits.shape[1]
    values = np.empty(experts, dtype=np.float32)
    for r in range(logits.shape[0]):
        row, new = logits[r], out[r]
        top = row[0]
        for e in range(experts):
            top = max(top, row[e])
        for e in range(experts):
            values[e] = math.exp(row[e] - top)
        total = np.float32(0.0)
        for _ in range(kept):
            best = 0
            for e in range(1, experts):
                if values[e] > values[best]:
                    best = e
            new[best] = values[best]
            total += values[best]
            values[best] = -1
        for e in range(experts):
            new[e] /= total
