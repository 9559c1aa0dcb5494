"""Elementwise, reduction, softmax, top-k, indexing and scan instructions of the decode machine (see `fused_isa`).

Each computes in float32 (or int64) on rows of at most `CHUNK` elements and rounds once, where it stores its result: the
points at which eager PyTorch rounds too. `scratch` is room for 4 * CHUNK * 8 bytes.
"""

import math

from seqmoe.runtime.kernels import fused_isa as isa
from seqmoe.runtime.kernels.fused_math import (
    exp_f32,
    f32,
    f64_from_bits,
    floor_f32,
    kernel,
    load_bf16,
    load_f32,
    load_i32,
    load_i64,
    load_u8,
    sqrt_f32,
    store_bf16,
    store_f32,
    store_i32,
    store_i64,
    store_u8,
)

CHUNK = 1024
F32, BF16, I64, U8, I32, IMMEDIATE = isa.F32, isa.BF16, isa.I64, isa.U8, isa.I32, isa.IMMEDIATE


field = load_i64  # field(row, column) of the instruction at address `row`


@kernel()
def load_one(address: int, dtype: int, index: int) -> float:
    """One element as float32."""
    if dtype == F32:
        return load_f32(address, index)
    if dtype == BF16:
        return load_bf16(address, index)
    if dtype == I64:
        return f32(float(load_i64(address, index)))
    if dtype == U8:
        return f32(float(load_u8(address, index)))
    if dtype == I32:
        return f32(float(load_i32(address, index)))
    return f32(f64_from_bits(address))


@kernel()
def store_one(address: int, dtype: int, index: int, value: float) -> None:
    if dtype == F32:
        store_f32(address, index, value)
    elif dtype == BF16:
        store_bf16(address, index, value)
    elif dtype == I64:
        store_i64(address, index, int(value))
    elif dtype == U8:
        store_u8(address, index, 1 if value != 0 else 0)
    else:
        store_i32(address, index, int(value))


@kernel("int64(int64, int64, int64, int64, int64, int64)")
def load_row(address: int, dtype: int, start: int, stride: int, n: int, into: int) -> int:
    """Address of n float32: the operand itself where it is such a row already, else `into`, filled."""
    if dtype == F32 and stride == 1:
        return address + 4 * start
    if stride == 0 or dtype == IMMEDIATE:
        value = load_one(address, dtype, start)
        for i in range(n):
            store_f32(into, i, value)
    elif dtype == BF16:
        base = address + 2 * start
        if stride == 1:
            for i in range(n):
                store_f32(into, i, load_bf16(base, i))
        else:
            for i in range(n):
                store_f32(into, i, load_bf16(base, i * stride))
    elif dtype == F32:
        base = address + 4 * start
        for i in range(n):
            store_f32(into, i, load_f32(base, i * stride))
    else:
        for i in range(n):
            store_f32(into, i, load_one(address, dtype, start + i * stride))
    return into


@kernel("void(int64, int64, int64, int64, int64, int64)")
def store_row(address: int, dtype: int, start: int, stride: int, n: int, row: int) -> None:
    """Rounds n float32 at `row` into the output."""
    if dtype == BF16:
        base = address + 2 * start
        if stride == 1:
            for i in range(n):
                store_bf16(base, i, load_f32(row, i))
        else:
            for i in range(n):
                store_bf16(base, i * stride, load_f32(row, i))
    elif dtype == F32:
        base = address + 4 * start
        if base == row and stride == 1:
            return
        for i in range(n):
            store_f32(base, i * stride, load_f32(row, i))
    else:
        for i in range(n):
            store_one(address, dtype, start + i * stride, load_f32(row, i))


@kernel()
def unary_row(fn: int, a: int, o: int, n: int, imm0: float, imm1: float) -> None:
    if fn == isa.E_NEG:
        for i in range(n):
            store_f32(o, i, -load_f32(a, i))
    elif fn == isa.E_RSQRT:
        for i in range(n):
            store_f32(o, i, f32(1.0) / sqrt_f32(load_f32(a, i)))
    elif fn == isa.E_SQRT:
        for i in range(n):
            store_f32(o, i, sqrt_f32(load_f32(a, i)))
    elif fn == isa.E_EXP:
        for i in range(n):
            store_f32(o, i, exp_f32(load_f32(a, i)))
    elif fn == isa.E_SIGMOID:
        for i in range(n):
            store_f32(o, i, f32(1.0) / (f32(1.0) + exp_f32(-load_f32(a, i))))
    elif fn == isa.E_SILU:
        for i in range(n):
            x = load_f32(a, i)
            store_f32(o, i, x / (f32(1.0) + exp_f32(-x)))
    elif fn == isa.E_SQUARE:
        for i in range(n):
            x = load_f32(a, i)
            store_f32(o, i, x * x)
    elif fn == isa.E_RELU:
        for i in range(n):
            x = load_f32(a, i)
            store_f32(o, i, max(f32(0.0), x))
    elif fn == isa.E_CLAMP:
        for i in range(n):
            store_f32(o, i, min(max(load_f32(a, i), imm0), imm1))
    else:
        for i in range(n):
            x = float(load_f32(a, i))  # float64 here: these are short rows, and rare
            if fn == isa.E_LOG:
                y = math.log(x)
            elif fn == isa.E_LOG1P:
                y = math.log1p(x)
            elif fn == isa.E_GELU:
                y = 0.5 * x * (1.0 + math.erf(x * 0.7071067811865476))
            elif fn == isa.E_GELU_TANH:
                y = 0.5 * x * (1.0 + math.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
            elif fn == isa.E_TANH:
                y = math.tanh(x)
            elif fn == isa.E_COS:
                y = math.cos(x)
            elif fn == isa.E_SIN:
                y = math.sin(x)
            elif fn == isa.E_ABS:
                y = abs(x)
            elif fn == isa.E_RECIPROCAL:
                y = 1.0 / x
            elif fn == isa.E_SOFTPLUS:
                y = x if x * imm0 > imm1 else math.log1p(math.exp(x * imm0)) / imm0
            elif fn == isa.E_NOT:
                y = 1.0 if x == 0.0 else 0.0
            else:  # E_FLOOR
                y = math.floor(x)
            store_f32(o, i, f32(y))


@kernel()
def binary_row(fn: int, a: int, b: int, o: int, n: int) -> None:
    if fn == isa.E_ADD:
        for i in range(n):
            store_f32(o, i, load_f32(a, i) + load_f32(b, i))
    elif fn == isa.E_MUL:
        for i in range(n):
            store_f32(o, i, load_f32(a, i) * load_f32(b, i))
    elif fn == isa.E_SUB:
        for i in range(n):
            store_f32(o, i, load_f32(a, i) - load_f32(b, i))
    elif fn == isa.E_DIV:
        for i in range(n):
            store_f32(o, i, load_f32(a, i) / load_f32(b, i))
    elif fn == isa.E_MAX:
        for i in range(n):
            store_f32(o, i, max(load_f32(a, i), load_f32(b, i)))
    elif fn == isa.E_MIN:
        for i in range(n):
            store_f32(o, i, min(load_f32(a, i), load_f32(b, i)))
    else:
        for i in range(n):
            x, y = load_f32(a, i), load_f32(b, i)
            r = f32(0.0)
            if fn == isa.E_POW:
                r = f32(math.pow(float(x), float(y)))
            elif fn == isa.E_EQ:
                r = f32(1.0) if x == y else f32(0.0)
            elif fn == isa.E_NE:
                r = f32(1.0) if x != y else f32(0.0)
            elif fn == isa.E_LT:
                r = f32(1.0) if x < y else f32(0.0)
            elif fn == isa.E_LE:
                r = f32(1.0) if x <= y else f32(0.0)
            elif fn == isa.E_GT:
                r = f32(1.0) if x > y else f32(0.0)
            elif fn == isa.E_GE:
                r = f32(1.0) if x >= y else f32(0.0)
            elif fn == isa.E_AND:
                r = f32(1.0) if x != 0 and y != 0 else f32(0.0)
            elif fn == isa.E_OR:
                r = f32(1.0) if x != 0 or y != 0 else f32(0.0)
            elif fn == isa.E_XOR:
                r = f32(1.0) if (x != 0) != (y != 0) else f32(0.0)
            elif fn == isa.E_FLOORDIV:
                r = floor_f32(x / y)
            else:  # E_REMAINDER
                r = x - floor_f32(x / y) * y
            store_f32(o, i, r)


@kernel()
def elementwise(row: int, source: int, scratch: int) -> None:
    """out = fn(in0, in1, in2) over up to four dimensions, any strides, any mix of element types."""
    fn = field(row, isa.FN)
    in0 = source if source != 0 else field(row, isa.IN0)
    imm0, imm1 = f32(f64_from_bits(field(row, isa.IMM0))), f32(f64_from_bits(field(row, isa.IMM1)))
    n = field(row, isa.SIZES + 3)
    step = CHUNK * 4
    for i in range(field(row, isa.SIZES)):
        for j in range(field(row, isa.SIZES + 1)):
            for k in range(field(row, isa.SIZES + 2)):
                out = i * field(row, isa.OUT + 2) + j * field(row, isa.OUT + 3) + k * field(row, isa.OUT + 4)
                at0 = i * field(row, isa.IN0 + 2) + j * field(row, isa.IN0 + 3) + k * field(row, isa.IN0 + 4)
                at1 = i * field(row, isa.IN1 + 2) + j * field(row, isa.IN1 + 3) + k * field(row, isa.IN1 + 4)
                at2 = i * field(row, isa.IN2 + 2) + j * field(row, isa.IN2 + 3) + k * field(row, isa.IN2 + 4)
                done = 0
                while done < n:
                    m = min(CHUNK, n - done)
                    a = load_row(
                        in0,
                        field(row, isa.IN0 + 1),
                        at0 + done * field(row, isa.IN0 + 5),
                        field(row, isa.IN0 + 5),
                        m,
                        scratch,
                    )
                    o = scratch + 3 * step
                    direct = field(row, isa.OUT + 1) == F32 and field(row, isa.OUT + 5) == 1
                    if direct:
                        o = field(row, isa.OUT) + 4 * (out + done)
                    if fn == isa.E_COPY:
                        o = a
                        direct = False
                    elif fn < 32:
                        unary_row(fn, a, o, m, imm0, imm1)
                    else:
                        b = load_row(
                            field(row, isa.IN1), field(row, isa.IN1 + 1), at1 + done * field(row, isa.IN1 + 5), field(row, isa.IN1 + 5), m,
                            scratch + step,
                        )  # fmt: skip
                        if fn < 64:
                            binary_row(fn, a, b, o, m)
                        else:
                            c = load_row(
                                field(row, isa.IN2), field(row, isa.IN2 + 1), at2 + done * field(row, isa.IN2 + 5), field(row, isa.IN2 + 5), m,
                                scratch + 2 * step,
                            )  # fmt: skip
                            if fn == isa.E_WHERE:
                                for x in range(m):
                                    store_f32(o, x, load_f32(b, x) if load_f32(a, x) != 0 else load_f32(c, x))
                            else:  # E_ADDCMUL
                                for x in range(m):
                                    store_f32(o, x, load_f32(a, x) + imm0 * load_f32(b, x) * load_f32(c, x))
                    if not direct:
                        store_row(
                            field(row, isa.OUT),
                            field(row, isa.OUT + 1),
                            out + done * field(row, isa.OUT + 5),
                            field(row, isa.OUT + 5),
                            m,
                            o,
                        )
                    done += m


@kernel()
def load_int(address: int, dtype: int, index: int) -> int:
    if dtype == I64:
        return load_i64(address, index)
    if dtype == I32:
        return int(load_i32(address, index))
    if dtype == U8:
        return int(load_u8(address, index))
    return int(f64_from_bits(address))


@kernel()
def place(row: int, operand: int, i: int, j: int, k: int, m: int) -> int:
    """The element that the four indices mean in the operand whose fields begin at `operand`."""
    return (
        i * field(row, operand + 2)
        + j * field(row, operand + 3)
        + k * field(row, operand + 4)
        + m * field(row, operand + 5)
    )


@kernel()
def elementwise_int(row: int) -> None:
    """As `elementwise`, on integers and booleans, exactly; rows are short, so no vectors."""
    fn = field(row, isa.FN)
    for i in range(field(row, isa.SIZES)):
        for j in range(field(row, isa.SIZES + 1)):
            for k in range(field(row, isa.SIZES + 2)):
                for m in range(field(row, isa.SIZES + 3)):
                    out = place(row, isa.OUT, i, j, k, m)
                    at0 = place(row, isa.IN0, i, j, k, m)
                    at1 = place(row, isa.IN1, i, j, k, m)
                    x = load_int(field(row, isa.IN0), field(row, isa.IN0 + 1), at0)
                    y = 0
                    if fn >= 32:
                        y = load_int(field(row, isa.IN1), field(row, isa.IN1 + 1), at1)
                    r = x
                    if fn == isa.E_NEG:
                        r = -x
                    elif fn == isa.E_NOT:
                        r = 1 if x == 0 else 0
                    elif fn == isa.E_ADD:
                        r = x + y
                    elif fn == isa.E_SUB:
                        r = x - y
                    elif fn == isa.E_MUL:
                        r = x * y
                    elif fn == isa.E_MAX:
                        r = max(x, y)
                    elif fn == isa.E_MIN:
                        r = min(x, y)
                    elif fn == isa.E_EQ:
                        r = 1 if x == y else 0
                    elif fn == isa.E_NE:
                        r = 1 if x != y else 0
                    elif fn == isa.E_LT:
                        r = 1 if x < y else 0
                    elif fn == isa.E_LE:
                        r = 1 if x <= y else 0
                    elif fn == isa.E_GT:
                        r = 1 if x > y else 0
                    elif fn == isa.E_GE:
                        r = 1 if x >= y else 0
                    elif fn == isa.E_AND:
                        r = x & y
                    elif fn == isa.E_OR:
                        r = x | y
                    elif fn == isa.E_XOR:
                        r = x ^ y
                    elif fn == isa.E_FLOORDIV:
                        r = x // y
                    elif fn == isa.E_REMAINDER:
                        r = x - (x // y) * y
                    elif fn == isa.E_WHERE:
                        at2 = place(row, isa.IN2, i, j, k, m)
                        r = y if x != 0 else load_int(field(row, isa.IN2), field(row, isa.IN2 + 1), at2)
                    if field(row, isa.OUT + 1) == I64:
                        store_i64(field(row, isa.OUT), out, r)
                    elif field(row, isa.OUT + 1) == I32:
                        store_i32(field(row, isa.OUT), out, r)
                    else:
                        store_u8(field(row, isa.OUT), out, 1 if r != 0 else 0)


@kernel()
def reduce(row: int, scratch: int) -> None:
    """out[outer] = fn over up to three reduced dimensions (AUX: 3 sizes, 3 strides of in0), float32 sums."""
    fn = field(row, isa.FN)
    r0, r1, r2 = field(row, isa.AUX), field(row, isa.AUX + 1), field(row, isa.AUX + 2)
    s0, s1, s2 = field(row, isa.AUX + 3), field(row, isa.AUX + 4), field(row, isa.AUX + 5)
    address, dtype = field(row, isa.IN0), field(row, isa.IN0 + 1)
    for i in range(field(row, isa.SIZES)):
        for j in range(field(row, isa.SIZES + 1)):
            for k in range(field(row, isa.SIZES + 2)):
                for l in range(field(row, isa.SIZES + 3)):
                    out = place(row, isa.OUT, i, j, k, l)
                    base = place(row, isa.IN0, i, j, k, l)
                    total = f32(0.0)
                    exact = 0
                    best = 0
                    if fn == isa.R_MAX or fn == isa.R_ARGMAX:
                        total = f32(-math.inf)
                    elif fn == isa.R_MIN:
                        total = f32(math.inf)
                    elif fn == isa.R_PROD or fn == isa.R_ALL:
                        total = f32(1.0)
                    if field(row, isa.INTEGER) != 0:
                        for x in range(r0):
                            for y in range(r1):
                                for z in range(r2):
                                    exact += load_int(address, dtype, base + x * s0 + y * s1 + z * s2)
                        store_i64(field(row, isa.OUT), out, exact)
                        continue
                    for x in range(r0):
                        for y in range(r1):
                            start = base + x * s0 + y * s1
                            done = 0
                            while done < r2:
                                m = min(CHUNK, r2 - done)
                                a = load_row(address, dtype, start + done * s2, s2, m, scratch)
                                if fn == isa.R_SUM or fn == isa.R_MEAN:
                                    for z in range(m):
                                        total += load_f32(a, z)
                                elif fn == isa.R_MAX:
                                    for z in range(m):
                                        total = max(total, load_f32(a, z))
                                elif fn == isa.R_MIN:
                                    for z in range(m):
                                        total = min(total, load_f32(a, z))
                                elif fn == isa.R_PROD:
                                    for z in range(m):
                                        total *= load_f32(a, z)
                                elif fn == isa.R_ANY:
                                    for z in range(m):
                                        if load_f32(a, z) != 0:
                                            total = f32(1.0)
                                elif fn == isa.R_ALL:
                                    for z in range(m):
                                        if load_f32(a, z) == 0:
                                            total = f32(0.0)
                                else:  # R_ARGMAX
                                    for z in range(m):
                                        if load_f32(a, z) > total:
                                            total = load_f32(a, z)
                                            best = done + z
                                done += m
                    if fn == isa.R_ARGMAX:
                        store_i64(field(row, isa.OUT), out, best)
                        continue
                    if fn == isa.R_MEAN:
                        total = total / f32(float(r0 * r1 * r2))
                    store_one(field(row, isa.OUT), field(row, isa.OUT + 1), out, total)
