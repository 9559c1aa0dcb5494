"""Softmax, top-k, picking and running sums of the decode machine: instructions on rows (see `fused_isa`)."""

import math

from seqmoe.runtime.kernels import fused_isa as isa
from seqmoe.runtime.kernels.fused_math import exp_f32, f32, kernel, load_f32, load_i64, store_f32, store_i64
from seqmoe.runtime.kernels.fused_ops import (
    CHUNK,
    I64,
    field,
    load_int,
    load_one,
    load_row,
    place,
    store_one,
    store_row,
)


@kernel()
def softmax(row: int, scratch: int) -> None:
    """Softmax of rows (the last of the four dimensions), in float32. `scratch` holds a row."""
    n = field(row, isa.SIZES + 3)
    for i in range(field(row, isa.SIZES)):
        for j in range(field(row, isa.SIZES + 1)):
            for k in range(field(row, isa.SIZES + 2)):
                out = i * field(row, isa.OUT + 2) + j * field(row, isa.OUT + 3) + k * field(row, isa.OUT + 4)
                at = i * field(row, isa.IN0 + 2) + j * field(row, isa.IN0 + 3) + k * field(row, isa.IN0 + 4)
                a = load_row(field(row, isa.IN0), field(row, isa.IN0 + 1), at, field(row, isa.IN0 + 5), n, scratch)
                top = f32(-math.inf)
                for x in range(n):
                    top = max(top, load_f32(a, x))
                total = f32(0.0)
                for x in range(n):
                    e = exp_f32(load_f32(a, x) - top)
                    store_f32(scratch, x, e)
                    total += e
                for x in range(n):
                    store_f32(scratch, x, load_f32(scratch, x) / total)
                store_row(field(row, isa.OUT), field(row, isa.OUT + 1), out, field(row, isa.OUT + 5), n, scratch)


@kernel()
def topk(row: int, scratch: int) -> None:
    """The k largest of each row, in falling order, the lower index first among equals; values to OUT, indices to IN1."""
    n, count = field(row, isa.SIZES + 3), field(row, isa.AUX)
    sign = f32(1.0) if field(row, isa.AUX + 1) != 0 else f32(-1.0)
    for i in range(field(row, isa.SIZES)):
        for j in range(field(row, isa.SIZES + 1)):
            for k in range(field(row, isa.SIZES + 2)):
                out = i * field(row, isa.OUT + 2) + j * field(row, isa.OUT + 3) + k * field(row, isa.OUT + 4)
                to = i * field(row, isa.IN1 + 2) + j * field(row, isa.IN1 + 3) + k * field(row, isa.IN1 + 4)
                at = i * field(row, isa.IN0 + 2) + j * field(row, isa.IN0 + 3) + k * field(row, isa.IN0 + 4)
                for x in range(n):
                    value = (
                        load_one(field(row, isa.IN0), field(row, isa.IN0 + 1), at + x * field(row, isa.IN0 + 5)) * sign
                    )
                    store_f32(scratch, x, f32(math.inf) if math.isnan(value) else value)
                for y in range(count):
                    top, best = f32(-math.inf), 0
                    for x in range(n):
                        top = max(top, load_f32(scratch, x))
                    while best < n - 1 and load_f32(scratch, best) != top:
                        best += 1
                    if top == f32(-math.inf):  # only entries that were -inf or taken are left: take the first not taken
                        best = 0
                        while best < n - 1 and taken(row, to, y, best):
                            best += 1
                    store_one(
                        field(row, isa.OUT), field(row, isa.OUT + 1), out + y * field(row, isa.OUT + 5), top * sign
                    )
                    store_i64(field(row, isa.IN1), to + y * field(row, isa.IN1 + 5), best)
                    store_f32(scratch, best, f32(-math.inf))


@kernel()
def taken(row: int, to: int, count: int, index: int) -> bool:
    found = False
    for y in range(count):
        found |= load_i64(field(row, isa.IN1), to + y * field(row, isa.IN1 + 5)) == index
    return found


@kernel()
def rows(row: int, scratch: int) -> None:
    """out[i] = table[index[i]] for SIZES[3] indices: IN0 the table (AUX: row stride, columns), IN1 the indices."""
    columns = field(row, isa.AUX + 1)
    for i in range(field(row, isa.SIZES + 3)):
        at = load_int(field(row, isa.IN1), field(row, isa.IN1 + 1), i * field(row, isa.IN1 + 5)) * field(row, isa.AUX)
        done = 0
        while done < columns:
            m = min(CHUNK, columns - done)
            a = load_row(field(row, isa.IN0), field(row, isa.IN0 + 1), at + done, 1, m, scratch)
            store_row(field(row, isa.OUT), field(row, isa.OUT + 1), i * field(row, isa.OUT + 5) + done, 1, m, a)
            done += m


@kernel()
def gather(row: int) -> None:
    """torch.gather (out = in0 picked by in1) or scatter (out picked by in1 = in2); AUX is the picked dimension's stride.

    The stride of the picked dimension is 0 among the strides of the picked tensor. FN is 1 for scatter.
    """
    scatter = field(row, isa.FN) != 0
    for i in range(field(row, isa.SIZES)):
        for j in range(field(row, isa.SIZES + 1)):
            for k in range(field(row, isa.SIZES + 2)):
                for m in range(field(row, isa.SIZES + 3)):
                    out = place(row, isa.OUT, i, j, k, m)
                    at0 = place(row, isa.IN0, i, j, k, m)
                    at1 = place(row, isa.IN1, i, j, k, m)
                    pick = load_int(field(row, isa.IN1), field(row, isa.IN1 + 1), at1) * field(row, isa.AUX)
                    if scatter:
                        out += pick
                    else:
                        at0 += pick
                    if field(row, isa.IN0 + 1) == I64:
                        store_i64(field(row, isa.OUT), out, load_i64(field(row, isa.IN0), at0))
                    else:
                        store_one(
                            field(row, isa.OUT),
                            field(row, isa.OUT + 1),
                            out,
                            load_one(field(row, isa.IN0), field(row, isa.IN0 + 1), at0),
                        )


@kernel()
def cumsum(row: int) -> None:
    """Running sum along the last of the four dimensions."""
    for i in range(field(row, isa.SIZES)):
        for j in range(field(row, isa.SIZES + 1)):
            for k in range(field(row, isa.SIZES + 2)):
                out = i * field(row, isa.OUT + 2) + j * field(row, isa.OUT + 3) + k * field(row, isa.OUT + 4)
                at = i * field(row, isa.IN0 + 2) + j * field(row, isa.IN0 + 3) + k * field(row, isa.IN0 + 4)
                total, exact = f32(0.0), 0
                for x in range(field(row, isa.SIZES + 3)):
                    index = at + x * field(row, isa.IN0 + 5)
                    if field(row, isa.INTEGER) != 0:
                        exact += load_int(field(row, isa.IN0), field(row, isa.IN0 + 1), index)
                        store_i64(field(row, isa.OUT), out + x * field(row, isa.OUT + 5), exact)
                    else:
                        total += load_one(field(row, isa.IN0), field(row, isa.IN0 + 1), index)
                        store_one(
                            field(row, isa.OUT), field(row, isa.OUT + 1), out + x * field(row, isa.OUT + 5), total
                        )
