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

Array = NDArray[np.float32]


class FastState(NamedTuple):
    """State of b sequences: of each block the convolution's last inputs and the recurrent state."""

    conv: Array  # [b, blocks, d_conv - 1, channels], oldest first
    ssm: Array  # [b, blocks, d_inner, d_state]


class _Weights(NamedTuple):
    """A group's weights; leading dimension of all but input, token and output: blocks."""

    input: NDArray[np.int8]  # [features, m]: a column of the input layer a row, few of which are read
    input_scale: Array  # [m]
    input_bias: Array  # [m]
    recursed: Array  # [m]
    token: NDArray[np.int8]  # [rows, m]
    token_scale: Array  # [rows]
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
        conv = np.zeros((batch, blocks, c.d_conv - 1, channels), dtype=np.float32)
        return FastState(conv, np.zeros((batch, blocks, w.out_proj.shape[2], c.d_state), dtype=np.float32))

    def step(
        self, psi: Array, rows: NDArray[np.int64] | None, state: FastState, recursed: bool
    ) -> tuple[Array, FastState]:
        """psi [b, n, E], token rows [b] or None -> (logits [b, n, E], state after)."""
        after = FastState(np.empty_like(state.conv), np.empty_like(state.ssm))
        logits = np.empty(psi.shape, dtype=np.float32)
        if rows is None:
            rows = np.full(len(psi), NO_TOKEN, dtype=np.int64)
        _step_rows(self.weights, np.ascontiguousarray(psi), rows, recursed, state, after, logits)
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
        """States of one sequence each, as one state of them all."""
        return FastState(np.concatenate([s.conv for s in states]), np.concatenate([s.ssm for s in states]))


def _pack(net: GroupNet) -> _Weights:
    blocks = net.mixers()

    def stacked(values: list[torch.Tensor]) -> Array:
        return np.ascontiguousarray(torch.stack([v.detach().cpu().float() for v in values]).numpy())

    inputs, input_scale = _quantise(_array(net.input.weight))
    output, output_scale = _quantise(_array(net.output.weight))
    in_proj, in_scale = _quantise(stacked([b.mixer.in_proj.weight for b in blocks]))
    out_proj, out_scale = _quantise(stacked([b.mixer.out_proj.weight for b in blocks]))
    if net.token is not None:
        token, token_scale = _quantise(_array(net.token.weight))
    else:
        token, token_scale = np.zeros((1, net.config.hidden), dtype=np.int8), np.zeros(1, dtype=np.float32)
    biases = [b.mixer.conv1d.bias for b in blocks]
    assert all(bias is not None for bias in biases)
    return _Weights(
        np.ascontiguousarray(inputs.T),
        input_scale,
        _array(net.input.bias),
        _array(net.recursed),
        token,
        token_scale,
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


def _quantise(weight: Array) -> tuple[NDArray[np.int8], Array]:
    """Rows [..., out, in] as int8 and one scale for each of them: the value is int8 * scale."""
    scale = np.maximum(np.abs(weight).max(axis=-1), 1e-12) / np.float32(127)
    return np.rint(weight / scale[..., None]).astype(np.int8), scale.astype(np.float32)


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
def _step_rows(w, psi, rows, recursed, before, after, logits):  # type: ignore[no-untyped-def]
    """`GroupNet.step` for each sequence of the batch in turn."""
    features, m = w.input.shape
    x, normed = np.empty(m, dtype=np.float32), np.empty(m, dtype=np.float32)
    for b in range(psi.shape[0]):
        flat, out = psi[b].reshape(features), logits[b].reshape(features)
        x[:] = 0
        for f in range(features):
            if flat[f] > 0:  # few are: the chosen of each layer
                factor, row = np.float32(math.sqrt(flat[f])), w.input[f]
                for j in range(m):
                    x[j] += factor * np.float32(row[j])
        token, scale = w.token[rows[b]], w.token_scale[rows[b]]
        for j in range(m):
            x[j] = x[j] * w.input_scale[j] + w.input_bias[j] + np.float32(token[j]) * scale
        if recursed:
            for j in range(m):
                x[j] += w.recursed[j]
        for i in range(w.block_norm.shape[0]):
            _block(w, i, x, before.conv[b, i], after.conv[b, i], before.ssm[b, i], after.ssm[b, i])
        _rms_norm(x, w.norm, normed)
        _product(w.output, w.output_scale, normed, out)
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
