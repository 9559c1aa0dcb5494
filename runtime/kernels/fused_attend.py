"""Attention of one new query per sequence over the cache, for the decode machine: plain (grouped heads, windows, sinks, soft
cap) and latent (multi-head latent attention, without ever expanding the cached latents to keys and values).

Everything inside is float32; each head is computed by one thread, so the number of threads changes nothing.
"""

import math

from seqmoe.runtime.kernels import fused_isa as isa
from seqmoe.runtime.kernels.fused_dense import dot_row
from seqmoe.runtime.kernels.fused_math import exp_f32, f32, f64_from_bits, kernel, load_bf16, load_f32, store_f32
from seqmoe.runtime.kernels.fused_ops import BF16, field, load_one, store_row


@kernel()
def first_seen(run: int, sequence: int, end: int, window: int, chunk: int) -> int:
    """First position that a sequence's newest token sees: after its left padding, within its window or chunk."""
    start = field(run, isa.RUN_PADDING + sequence)
    if window > 0:
        start = max(start, end - window)
    if chunk > 0:
        start = max(start, (end - 1) // chunk * chunk)
    return start


@kernel()
def add_scaled(total: int, scale: float, vector: int, dtype: int, n: int) -> None:
    """total += scale * vector."""
    if dtype == BF16:
        for x in range(n):
            store_f32(total, x, load_f32(total, x) + scale * load_bf16(vector, x))
    else:
        for x in range(n):
            store_f32(total, x, load_f32(total, x) + scale * load_f32(vector, x))


@kernel("void(int64, int64, int64, int64, int64, int64)")
def dot_rows(x: int, rows: int, dtype: int, width: int, n: int, out: int) -> None:
    """out[t] = x . rows[t], for n rows of `width`, four at a time."""
    size = 2 if dtype == BF16 else 4
    t = 0
    while t + 4 <= n:
        r0 = rows + t * width * size
        r1, r2, r3 = r0 + width * size, r0 + 2 * width * size, r0 + 3 * width * size
        a, b, c, d = f32(0.0), f32(0.0), f32(0.0), f32(0.0)
        if dtype == BF16:
            for i in range(width):
                v = load_f32(x, i)
                a += v * load_bf16(r0, i)
                b += v * load_bf16(r1, i)
                c += v * load_bf16(r2, i)
                d += v * load_bf16(r3, i)
        else:
            for i in range(width):
                v = load_f32(x, i)
                a += v * load_f32(r0, i)
                b += v * load_f32(r1, i)
                c += v * load_f32(r2, i)
                d += v * load_f32(r3, i)
        store_f32(out, t, a)
        store_f32(out, t + 1, b)
        store_f32(out, t + 2, c)
        store_f32(out, t + 3, d)
        t += 4
    while t < n:
        store_f32(out, t, dot_row(x, rows + t * width * size, dtype, width))
        t += 1


@kernel("void(int64, int64, int64, int64, int64, int64)")
def add_rows(total: int, weights: int, rows: int, dtype: int, width: int, n: int) -> None:
    """total += sum over t of weights[t] * rows[t], four rows at a time."""
    size = 2 if dtype == BF16 else 4
    t = 0
    while t + 4 <= n:
        r0 = rows + t * width * size
        r1, r2, r3 = r0 + width * size, r0 + 2 * width * size, r0 + 3 * width * size
        a, b, c, d = load_f32(weights, t), load_f32(weights, t + 1), load_f32(weights, t + 2), load_f32(weights, t + 3)
        if dtype == BF16:
            for x in range(width):
                v = a * load_bf16(r0, x) + b * load_bf16(r1, x) + (c * load_bf16(r2, x) + d * load_bf16(r3, x))
                store_f32(total, x, load_f32(total, x) + v)
        else:
            for x in range(width):
                v = a * load_f32(r0, x) + b * load_f32(r1, x) + (c * load_f32(r2, x) + d * load_f32(r3, x))
                store_f32(total, x, load_f32(total, x) + v)
        t += 4
    while t < n:
        add_scaled(total, load_f32(weights, t), rows + t * width * size, dtype, width)
        t += 1


@kernel()
def exponentials(scores: int, n: int, top: float) -> float:
    """scores = exp(scores - top); gives their sum."""
    total = f32(0.0)
    for t in range(n):
        e = exp_f32(load_f32(scores, t) - top)
        store_f32(scores, t, e)
        total += e
    return total


@kernel()
def attend_heads(row: int, run: int, pair: int, room: int) -> None:
    """All query heads of one (sequence, key head). IN0 [b, heads, dk], OUT [b, heads, dv]; `room`: n + dk + dv float32.

    AUX: b, heads, kv heads, dk, dv, capacity, window, chunk, sinks' address and dtype. IMM0 scale, IMM1 softcap.
    """
    aux = isa.AUX
    heads, kv_heads = field(row, aux + 1), field(row, aux + 2)
    dk, dv, capacity = field(row, aux + 3), field(row, aux + 4), field(row, aux + 5)
    sinks, sinks_dtype = field(row, aux + 8), field(row, aux + 9)
    scale, softcap = f32(f64_from_bits(field(row, isa.IMM0))), f32(f64_from_bits(field(row, isa.IMM1)))
    i, g = pair // kv_heads, pair % kv_heads
    end = field(run, isa.RUN_POSITION) + 1
    start = first_seen(run, i, end, field(row, aux + 6), field(row, aux + 7))
    n = end - start
    group = heads // kv_heads
    kv_type = field(row, isa.IN1 + 1)
    size = 2 if kv_type == BF16 else 4
    keys = field(row, isa.IN1) + (pair * capacity + start) * dk * size
    values = field(row, isa.IN2) + (pair * capacity + start) * dv * size
    query, total, scores = room, room + dk * 4, room + (dk + dv) * 4
    for h in range(g * group, g * group + group):
        at = i * field(row, isa.IN0 + 2) + h * field(row, isa.IN0 + 3)
        for x in range(dk):
            q = load_one(field(row, isa.IN0), field(row, isa.IN0 + 1), at + x * field(row, isa.IN0 + 5))
            store_f32(query, x, q * scale)
        dot_rows(query, keys, kv_type, dk, n, scores)
        if softcap > f32(0.0):
            for t in range(n):
                store_f32(scores, t, f32(math.tanh(float(load_f32(scores, t) / softcap))) * softcap)
        top = f32(-math.inf)
        for t in range(n):
            top = max(top, load_f32(scores, t))
        weight = f32(0.0)
        if sinks != 0:
            sink = load_one(sinks, sinks_dtype, h)
            top = max(top, sink)
            weight = exp_f32(sink - top)
        weight += exponentials(scores, n, top)
        for x in range(dv):
            store_f32(total, x, f32(0.0))
        add_rows(total, scores, values, kv_type, dv, n)
        for x in range(dv):
            store_f32(total, x, load_f32(total, x) / weight)
        out = i * field(row, isa.OUT + 2) + h * field(row, isa.OUT + 3)
        store_row(field(row, isa.OUT), field(row, isa.OUT + 1), out, field(row, isa.OUT + 5), dv, total)


@kernel()
def attend_latent_head(row: int, run: int, pair: int, room: int) -> None:
    """One (sequence, head) over cached latents (IN1 [b, n, rank]) and rotated keys (IN2 [b, n, rope]).

    With the head's rows of the up-projection, W_k [nope, rank] and W_v [dv, rank]: the query moves into latent space,
    q W_k, the softmax weighs latents, and W_v is applied to their sum. AUX: b, heads, nope, rope, dv, rank, capacity,
    window, chunk, up-projection's address, dtype, row stride. `room`: n + nope + rope + dv + 2 rank float32.
    """
    aux = isa.AUX
    heads, nope, rope, dv = field(row, aux + 1), field(row, aux + 2), field(row, aux + 3), field(row, aux + 4)
    rank, capacity = field(row, aux + 5), field(row, aux + 6)
    i, h = pair // heads, pair % heads
    end = field(run, isa.RUN_POSITION) + 1
    start = first_seen(run, i, end, field(row, aux + 7), field(row, aux + 8))
    n = end - start
    scale = f32(f64_from_bits(field(row, isa.IMM0)))
    w_type, kv_type = field(row, aux + 10), field(row, isa.IN1 + 1)
    w_size, size = 2 if w_type == BF16 else 4, 2 if kv_type == BF16 else 4
    w_stride = field(row, aux + 11) * w_size
    w = field(row, aux + 9) + h * (nope + dv) * w_stride
    latents = field(row, isa.IN1) + (i * capacity + start) * rank * size
    rotated = field(row, isa.IN2) + (i * capacity + start) * rope * size
    query, moved = room, room + (nope + rope) * 4
    total, out_row = moved + rank * 4, moved + 2 * rank * 4
    scores = out_row + dv * 4
    at = i * field(row, isa.IN0 + 2) + h * field(row, isa.IN0 + 3)
    for x in range(nope + rope):
        q = load_one(field(row, isa.IN0), field(row, isa.IN0 + 1), at + x * field(row, isa.IN0 + 5))
        store_f32(query, x, q * scale)
    for x in range(rank):
        store_f32(moved, x, f32(0.0))
        store_f32(total, x, f32(0.0))
    for x in range(nope):
        add_scaled(moved, load_f32(query, x), w + x * w_stride, w_type, rank)
    dot_rows(moved, latents, kv_type, rank, n, scores)
    top = f32(-math.inf)
    for t in range(n):
        s = load_f32(scores, t) + dot_row(query + nope * 4, rotated + t * rope * size, kv_type, rope)
        store_f32(scores, t, s)
        top = max(top, s)
    weight = exponentials(scores, n, top)
    add_rows(total, scores, latents, kv_type, rank, n)
    for x in range(rank):
        store_f32(total, x, load_f32(total, x) / weight)
    for x in range(dv):
        store_f32(out_row, x, dot_row(total, w + (nope + x) * w_stride, w_type, rank))
    out = i * field(row, isa.OUT + 2) + h * field(row, isa.OUT + 3)
    store_row(field(row, isa.OUT), field(row, isa.OUT + 1), out, field(row, isa.OUT + 5), dv, out_row)
