"""Linear layers, batched products, convolution, norms and the key-value cache of the decode machine (see `fused_isa`).

Sums are float32 in a fixed order that does not depend on the number of threads; results are rounded once.
"""

from seqmoe.runtime.kernels import fused_isa as isa
from seqmoe.runtime.kernels.fused_math import f32, f64_from_bits, kernel, load_bf16, load_f32, sqrt_f32, store_f32
from seqmoe.runtime.kernels.fused_ops import BF16, F32, field, load_one, load_row, store_one, store_row


@kernel()
def dot_row(x: int, w: int, dtype: int, n: int) -> float:
    """Dot product of n float32 at x with a row of weights."""
    total = f32(0.0)
    if dtype == BF16:
        for i in range(n):
            total += load_f32(x, i) * load_bf16(w, i)
    else:
        for i in range(n):
            total += load_f32(x, i) * load_f32(w, i)
    return total


@kernel()
def linear_rows(row: int, x: int, first: int, last: int) -> None:
    """Output columns first..last-1 of a linear layer, all m rows; x is float32 [m, k], contiguous."""
    m, k = field(row, isa.SIZES), field(row, isa.SIZES + 2)
    w, w_dtype = field(row, isa.IN1), field(row, isa.IN1 + 1)
    bias, bias_dtype = field(row, isa.IN2), field(row, isa.IN2 + 1)
    out, out_dtype, out_stride = field(row, isa.OUT), field(row, isa.OUT + 1), field(row, isa.OUT + 4)
    w_stride = field(row, isa.IN1 + 4) * (2 if w_dtype == BF16 else 4)
    for n in range(first, last):
        add = f32(0.0)
        if bias != 0:
            add = load_one(bias, bias_dtype, n)
        for i in range(m):
            store_one(out, out_dtype, i * out_stride + n, dot_row(x + i * k * 4, w + n * w_stride, w_dtype, k) + add)


@kernel()
def linear_input(row: int, scratch: int) -> int:
    """in0 [m, k] as contiguous float32: itself where it is that already, else in `scratch`."""
    m, k = field(row, isa.SIZES), field(row, isa.SIZES + 2)
    x, dtype, stride = field(row, isa.IN0), field(row, isa.IN0 + 1), field(row, isa.IN0 + 4)
    if dtype == F32 and (stride == k or m == 1):
        return x
    for i in range(m):
        to = scratch + i * k * 4
        a = load_row(x, dtype, i * stride, 1, k, to)
        if a != to:
            for j in range(k):
                store_f32(to, j, load_f32(a, j))
    return scratch


@kernel()
def matmul(row: int) -> None:
    """out[b, m, n] = imm0 * sum_k in0[b, m, k] in1[b, k, n] + imm1 * in2; sizes: 3 batch; AUX m, n, k, then strides.

    AUX + 3: out m, n; in0 m, k; in1 k, n; in2 m, n. Small products only, any strides.
    """
    aux = isa.AUX
    m, n, k = field(row, aux), field(row, aux + 1), field(row, aux + 2)
    out_m, out_n, a_m, a_k = field(row, aux + 3), field(row, aux + 4), field(row, aux + 5), field(row, aux + 6)
    b_k, b_n, c_m, c_n = field(row, aux + 7), field(row, aux + 8), field(row, aux + 9), field(row, aux + 10)
    scale, keep = f32(f64_from_bits(field(row, isa.IMM0))), f32(f64_from_bits(field(row, isa.IMM1)))
    a_at, ta, b_at, tb = field(row, isa.IN0), field(row, isa.IN0 + 1), field(row, isa.IN1), field(row, isa.IN1 + 1)
    dots = ta == F32 and a_k == 1 and b_k == 1 and tb <= BF16
    size = 2 if tb == BF16 else 4
    for b0 in range(field(row, isa.SIZES)):
        for b1 in range(field(row, isa.SIZES + 1)):
            for b2 in range(field(row, isa.SIZES + 2)):
                out = b0 * field(row, isa.OUT + 2) + b1 * field(row, isa.OUT + 3) + b2 * field(row, isa.OUT + 4)
                a = b0 * field(row, isa.IN0 + 2) + b1 * field(row, isa.IN0 + 3) + b2 * field(row, isa.IN0 + 4)
                b = b0 * field(row, isa.IN1 + 2) + b1 * field(row, isa.IN1 + 3) + b2 * field(row, isa.IN1 + 4)
                c = b0 * field(row, isa.IN2 + 2) + b1 * field(row, isa.IN2 + 3) + b2 * field(row, isa.IN2 + 4)
                for i in range(m):
                    for j in range(n):
                        total = f32(0.0)
                        at, bt = a + i * a_m, b + j * b_n
                        if dots:
                            total = dot_row(a_at + 4 * at, b_at + size * bt, tb, k)
                        else:
                            for x in range(k):
                                total += load_one(a_at, ta, at + x * a_k) * load_one(b_at, tb, bt + x * b_k)
                        total = total * scale
                        if field(row, isa.IN2) != 0:
                            at2 = c + i * c_m + j * c_n
                            total += keep * load_one(field(row, isa.IN2), field(row, isa.IN2 + 1), at2)
                        store_one(field(row, isa.OUT), field(row, isa.OUT + 1), out + i * out_m + j * out_n, total)


@kernel()
def conv(row: int) -> None:
    """Depthwise conv1d: out[b, c, t] = sum_j in0[b, c, t + j] in1[c, j] + in2[c]; sizes 1, b, c, t; AUX kernel size."""
    taps = field(row, isa.AUX)
    source, dtype, step = field(row, isa.IN0), field(row, isa.IN0 + 1), field(row, isa.IN0 + 5)
    w, w_dtype, w_step = field(row, isa.IN1), field(row, isa.IN1 + 1), field(row, isa.IN1 + 5)
    for b in range(field(row, isa.SIZES + 1)):
        for c in range(field(row, isa.SIZES + 2)):
            for t in range(field(row, isa.SIZES + 3)):
                total = f32(0.0)
                at = b * field(row, isa.IN0 + 3) + c * field(row, isa.IN0 + 4) + t * step
                for j in range(taps):
                    total += load_one(source, dtype, at + j * step) * load_one(
                        w, w_dtype, c * field(row, isa.IN1 + 4) + j * w_step
                    )
                if field(row, isa.IN2) != 0:
                    total += load_one(field(row, isa.IN2), field(row, isa.IN2 + 1), c)
                out = b * field(row, isa.OUT + 3) + c * field(row, isa.OUT + 4) + t * field(row, isa.OUT + 5)
                store_one(field(row, isa.OUT), field(row, isa.OUT + 1), out, total)


@kernel()
def norm(row: int, scratch: int) -> None:
    """RMS norm, or layer norm where AUX is 1, of rows (the last of four dimensions), as eager PyTorch rounds it.

    h = in0 * rsqrt(mean(in0 ** 2) + imm0), rounded to dtype FN (F32: not); out = h * in1 + in2, weights and bias being
    rows that may be absent. Layer norm takes the mean off first. `scratch` holds four rows.
    """
    n = field(row, isa.SIZES + 3)
    to, third, fourth = scratch + n * 4, scratch + n * 8, scratch + n * 12
    for i in range(field(row, isa.SIZES)):
        for j in range(field(row, isa.SIZES + 1)):
            for k in range(field(row, isa.SIZES + 2)):
                out = i * field(row, isa.OUT + 2) + j * field(row, isa.OUT + 3) + k * field(row, isa.OUT + 4)
                at = i * field(row, isa.IN0 + 2) + j * field(row, isa.IN0 + 3) + k * field(row, isa.IN0 + 4)
                a = load_row(field(row, isa.IN0), field(row, isa.IN0 + 1), at, field(row, isa.IN0 + 5), n, scratch)
                if field(row, isa.AUX) != 0:
                    mean = f32(0.0)
                    for x in range(n):
                        mean += load_f32(a, x)
                    mean = mean / f32(float(n))
                    for x in range(n):
                        store_f32(scratch, x, load_f32(a, x) - mean)
                    a = scratch
                total = f32(0.0)
                for x in range(n):
                    total += load_f32(a, x) * load_f32(a, x)
                scale = f32(1.0) / sqrt_f32(total / f32(float(n)) + f32(f64_from_bits(field(row, isa.IMM0))))
                for x in range(n):
                    store_f32(to, x, load_f32(a, x) * scale)
                if field(row, isa.FN) == BF16:
                    store_row(third, BF16, 0, 1, n, to)
                    load_row(third, BF16, 0, 1, n, to)
                if field(row, isa.IN1) != 0:
                    w = load_row(field(row, isa.IN1), field(row, isa.IN1 + 1), 0, field(row, isa.IN1 + 5), n, fourth)
                    for x in range(n):
                        store_f32(to, x, load_f32(to, x) * load_f32(w, x))
                if field(row, isa.IN2) != 0:
                    w = load_row(field(row, isa.IN2), field(row, isa.IN2 + 1), 0, field(row, isa.IN2 + 5), n, fourth)
                    for x in range(n):
                        store_f32(to, x, load_f32(to, x) + load_f32(w, x))
                store_row(field(row, isa.OUT), field(row, isa.OUT + 1), out, field(row, isa.OUT + 5), n, to)


@kernel()
def append(row: int, position: int, scratch: int) -> None:
    """Writes this step's keys (IN0) and values (IN1), [b, heads, dim], at `position` of the layer's cache.

    OUT, IN2: key and value cache [b, heads, capacity, dim]. AUX: b, heads, key dim, value dim, capacity.
    """
    heads, dk, dv = field(row, isa.AUX + 1), field(row, isa.AUX + 2), field(row, isa.AUX + 3)
    for i in range(field(row, isa.AUX)):
        for h in range(heads):
            at = (i * heads + h) * field(row, isa.AUX + 4) + position
            start = i * field(row, isa.IN0 + 2) + h * field(row, isa.IN0 + 3)
            a = load_row(field(row, isa.IN0), field(row, isa.IN0 + 1), start, field(row, isa.IN0 + 5), dk, scratch)
            store_row(field(row, isa.OUT), field(row, isa.OUT + 1), at * dk, 1, dk, a)
            start = i * field(row, isa.IN1 + 2) + h * field(row, isa.IN1 + 3)
            a = load_row(field(row, isa.IN1), field(row, isa.IN1 + 1), start, field(row, isa.IN1 + 5), dv, scratch)
            store_row(field(row, isa.IN2), field(row, isa.IN2 + 1), at * dv, 1, dv, a)
