"""LLVM code for the inner loops of the CPU experts kernels; `layer.py` calls them by address.

Written as explicit vector code, not left to the auto-vectoriser, for two reasons: speed without a C compiler, and a
fixed order of additions. Every dot product, for any number of rows and tokens at a time, adds in the same order: 16
lanes, then a fixed tree. So a result does not depend on how many tokens share an expert, nor on threads.

Weights are loaded with alignment 1, since a record lies in its slot wherever the file's alignment puts it.
Blocks are 32 columns: for bfloat16, 32 columns are 16 words of 32 bits, whose low halves are the even columns and high
halves the odd ones (little endian). `x` is stored to match: per block 16 even columns, then 16 odd ones. float16 and
float32 keep the natural order.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from llvmlite import binding, ir

from seqmoe.runtime.kernels import native

F32, BF16, F16 = 0, 1, 2  # codes of element types, as in the kernels' arguments
ITEM_BYTES = {F32: 4, BF16: 2, F16: 2}
BLOCK = 32  # columns (or rows of a result) handled together
LANES = 16
PREFETCH_BYTES = 1024  # how far ahead weights are asked for, at least: a page's first lines are new to the processor

i1, i8, i16, i32, i64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
f32, f16 = ir.FloatType(), ir.HalfType()
v16f, v16i = ir.VectorType(f32, LANES), ir.VectorType(i32, LANES)
void = ir.VoidType()

HAS_FMA = bool(binding.get_host_cpu_features().get("fma", True))  # x86 says; elsewhere fma is in the base set


def splat(value: float, of: ir.Type = v16f) -> ir.Constant:
    """The vector constant whose 16 lanes are all `value`."""
    return ir.Constant(of, [value] * LANES)


def fma(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """x * y + z, rounded once where the processor can."""
    if not HAS_FMA:
        return b.fadd(b.fmul(x, y), z)
    name = "llvm.fma.v16f32"
    intrinsic = b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(v16f, [v16f] * 3), name)
    return b.call(intrinsic, (x, y, z))


def at(b: ir.IRBuilder, address: ir.Value, of: ir.Type) -> ir.Value:
    """The integer address as a pointer to `of`."""
    return b.inttoptr(address, of.as_pointer())


def load(b: ir.IRBuilder, address: ir.Value, of: ir.Type, offset: int = 0) -> ir.Value:
    """An unaligned load from `address + offset` bytes."""
    return b.load(at(b, b.add(address, i64(offset)) if offset else address, of), align=1)


def store(b: ir.IRBuilder, value: ir.Value, address: ir.Value, offset: int = 0) -> None:
    """An unaligned store to `address + offset` bytes."""
    b.store(value, at(b, b.add(address, i64(offset)) if offset else address, value.type), align=1)


def prefetch(b: ir.IRBuilder, address: ir.Value, offset: int = 0) -> None:
    """Ask for the cache line at `address + offset`; harmless wherever that is."""
    name = "llvm.prefetch.p0i8"
    kind = ir.FunctionType(void, [i8.as_pointer(), i32, i32, i32])
    intrinsic = b.module.globals.get(name) or ir.Function(b.module, kind, name)
    b.call(intrinsic, (at(b, b.add(address, i64(offset)) if offset else address, i8), i32(0), i32(3), i32(1)))


def loop(
    b: ir.IRBuilder, count: ir.Value, carried: Sequence[ir.Value], body: Callable[[ir.Value, list], list]
) -> list[ir.Value]:
    """`for i in range(count): carried = body(i, carried)`; returns what is carried out."""
    before, head = b.block, b.append_basic_block("head")
    step, done = b.append_basic_block("step"), b.append_basic_block("done")
    b.branch(head)
    b.position_at_end(head)
    index = b.phi(i64)
    index.add_incoming(i64(0), before)
    phis = []
    for value in carried:
        phi = b.phi(value.type)
        phi.add_incoming(value, before)
        phis.append(phi)
    b.cbranch(b.icmp_signed("<", index, count), step, done)
    b.position_at_end(step)
    out = body(index, phis)
    index.add_incoming(b.add(index, i64(1)), b.block)
    for phi, value in zip(phis, out, strict=True):
        phi.add_incoming(value, b.block)
    b.branch(head)
    b.position_at_end(done)
    return phis


def load_block(b: ir.IRBuilder, kind: int, address: ir.Value) -> tuple[ir.Value, ir.Value]:
    """32 elements of type `kind` as two float vectors: (even, odd) for bfloat16, (first, second half) otherwise."""
    if kind == BF16:
        words = load(b, address, v16i)
        low = b.bitcast(b.shl(words, splat(16, v16i)), v16f)
        return low, b.bitcast(b.and_(words, splat(0xFFFF0000, v16i)), v16f)
    if kind == F16:
        half = ir.VectorType(f16, LANES)
        return b.fpext(load(b, address, half), v16f), b.fpext(load(b, address, half, 32), v16f)
    return load(b, address, v16f), load(b, address, v16f, 64)


def interleave(b: ir.IRBuilder, even: ir.Value, odd: ir.Value) -> tuple[ir.Value, ir.Value]:
    """(even, odd) columns to (first, second half) in natural order."""
    masks = [[(base + i // 2) + LANES * (i % 2) for i in range(LANES)] for base in (0, LANES // 2)]
    first, second = (b.shuffle_vector(even, odd, ir.Constant(v16i, mask)) for mask in masks)
    return first, second


def deinterleave(b: ir.IRBuilder, first: ir.Value, second: ir.Value) -> tuple[ir.Value, ir.Value]:
    """(first, second half) in natural order to (even, odd) columns."""
    even, odd = (
        b.shuffle_vector(first, second, ir.Constant(v16i, [2 * i + odd for i in range(LANES)])) for odd in (0, 1)
    )
    return even, odd


def to_bf16_bits(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Floats rounded to nearest even bfloat16, as 32-bit words whose low half is zero; NaN stays NaN."""
    bits = b.bitcast(x, v16i)
    lsb = b.and_(b.lshr(bits, splat(16, v16i)), splat(1, v16i))
    rounded = b.and_(b.add(bits, b.add(lsb, splat(0x7FFF, v16i))), splat(0xFFFF0000, v16i))
    return b.select(b.fcmp_unordered("uno", x, x), splat(0x7FC00000, v16i), rounded)


def round_to(b: ir.IRBuilder, kind: int, x: ir.Value) -> ir.Value:
    """Floats rounded to the nearest value of type `kind`, still as floats."""
    if kind == BF16:
        return b.bitcast(to_bf16_bits(b, x), v16f)
    if kind == F16:
        return b.fpext(b.fptrunc(x, ir.VectorType(f16, LANES)), v16f)
    return x


def exp(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """e**x to about 1 ulp (Cephes' expf: range reduction by log 2, then a polynomial of degree 6)."""
    low, high = splat(-87.3365478515625), splat(88.3762626647949)
    inside = b.select(b.fcmp_ordered("<", x, low), low, x)
    inside = b.select(b.fcmp_ordered(">", inside, high), high, inside)
    magic = splat(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer
    shifted = fma(b, inside, splat(1.44269502162933349609375), magic)
    n = b.fsub(shifted, magic)
    r = fma(b, n, splat(-0.693359375), inside)
    r = fma(b, n, splat(2.12194442749023437500e-4), r)
    poly = splat(1.98756912513636052608490e-4)
    for c in (1.39819993637502193450927734375e-3, 8.33345204591751098632812e-3, 4.16657961905002593994140625e-2,
              1.66666656732559204101562e-1, 5.00000000000000000e-1):  # fmt: skip
        poly = fma(b, poly, r, splat(c))
    poly = b.fadd(fma(b, poly, b.fmul(r, r), r), splat(1.0))
    # 2**n: n as an integer is in the low bits of `shifted`.
    power = b.shl(b.add(b.bitcast(shifted, v16i), splat(127, v16i)), splat(23, v16i))
    return b.fmul(poly, b.bitcast(power, v16f))


def silu(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """x / (1 + e**-x), as torch computes it."""
    return b.fdiv(x, b.fadd(splat(1.0), exp(b, b.fsub(splat(-0.0), x))))


def gelu_tanh(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """gelu(x), tanh approximation: x * sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3), which equals 0.5 x (1 + tanh u)."""
    cube = b.fmul(b.fmul(x, x), x)
    twice = b.fmul(splat(2 * 0.7978845608028654), fma(b, cube, splat(0.044715), x))
    return b.fdiv(x, b.fadd(splat(1.0), exp(b, b.fsub(splat(-0.0), twice))))


def relu(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """max(x, 0); NaN stays NaN."""
    return b.select(b.fcmp_ordered("<", x, splat(0.0)), splat(0.0), x)


def relu2(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """max(x, 0) squared. Rounding the maximum changes nothing, so one rounding at the end is torch's result too."""
    positive = relu(b, x)
    return b.fmul(positive, positive)


ACTIVATIONS: tuple[Callable[[ir.IRBuilder, ir.Value], ir.Value], ...] = (silu, gelu_tanh, relu, relu2)
SILU, GELU_TANH, RELU, RELU2 = range(4)


def sum_lanes(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The sum of 16 lanes by a fixed tree: halves are added until one lane is left."""
    width = LANES
    while width > 1:
        half = width // 2
        mask = ir.VectorType(i32, half)
        low = b.shuffle_vector(x, x, ir.Constant(mask, list(range(half))))
        high = b.shuffle_vector(x, x, ir.Constant(mask, list(range(half, width))))
        x, width = b.fadd(low, high), half
    return b.extract_element(x, i32(0))


def dot_body(kind: int, rows: int, tokens: int) -> Callable[..., None]:
    """Body of dot(w, row_stride, x, cols, out, token_stride): rows * tokens dot products of `cols` elements.

    `w` is the first row's address, `row_stride` in bytes, `x` the address of `tokens` int64 addresses of prepared
    vectors (float, padded with zeros to whole blocks). Row r of token t goes to out + t * token_stride + 4 r.
    """

    def body(b: ir.IRBuilder, w: ir.Value, row_stride: ir.Value, x: ir.Value, cols: ir.Value, out: ir.Value,
             token_stride: ir.Value) -> None:  # fmt: skip
        w_rows = [b.add(w, b.mul(row_stride, i64(r))) if r else w for r in range(rows)]
        ahead = b.mul(row_stride, i64(rows))
        ahead = b.select(b.icmp_signed("<", ahead, i64(PREFETCH_BYTES)), i64(PREFETCH_BYTES), ahead)
        x_rows = [load(b, x, i64, 8 * t) for t in range(tokens)]

        def add_block(w_at: list[ir.Value], x_offset: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            xs = [b.add(x_row, x_offset) for x_row in x_rows]
            new = []
            for r in range(rows):
                first, second = load_block(b, kind, w_at[r])
                for t in range(tokens):
                    total = fma(b, first, load(b, xs[t], v16f), sums[r * tokens + t])
                    new.append(fma(b, second, load(b, xs[t], v16f, 64), total))
            return new

        def full_block(index: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            offset = b.mul(index, i64(BLOCK * ITEM_BYTES[kind]))
            if PREFETCH_BYTES:
                for row in w_rows:
                    for line in range(BLOCK * ITEM_BYTES[kind] // 64):
                        prefetch(b, b.add(row, b.add(offset, ahead)), 64 * line)
            return add_block([b.add(row, offset) for row in w_rows], b.mul(index, i64(BLOCK * 4)), sums)

        blocks = b.sdiv(cols, i64(BLOCK))
        sums = loop(b, blocks, [splat(0.0)] * (rows * tokens), full_block)
        # What is left over is copied into a block of zeros: reading past the row could leave the slot.
        rest = b.sub(cols, b.mul(blocks, i64(BLOCK)))
        tails = []
        for _ in range(rows):
            with b.goto_entry_block():
                tails.append(b.alloca(ir.ArrayType(i8, BLOCK * ITEM_BYTES[kind])))

        def tail_block(_: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            addresses = [b.ptrtoint(tail, i64) for tail in tails]
            offset = b.mul(blocks, i64(BLOCK * ITEM_BYTES[kind]))
            item = i32 if kind == F32 else i16
            for row, address in zip(w_rows, addresses, strict=True):
                for part in range(ITEM_BYTES[kind] * BLOCK // 64):
                    store(b, splat(0, v16i), address, 64 * part)
                source = b.add(row, offset)

                def copy(i: ir.Value, _: list, source: ir.Value = source, address: ir.Value = address) -> list:
                    step = b.mul(i, i64(ITEM_BYTES[kind]))
                    store(b, load(b, b.add(source, step), item), b.add(address, step))
                    return []

                loop(b, rest, [], copy)
            return add_block(addresses, b.mul(blocks, i64(BLOCK * 4)), sums)

        sums = loop(b, b.zext(b.icmp_signed(">", rest, i64(0)), i64), sums, tail_block)
        for r in range(rows):
            for t in range(tokens):
                to = b.add(out, b.mul(token_stride, i64(t))) if t else out
                store(b, sum_lanes(b, sums[r * tokens + t]), to, 4 * r)

    return body


def outer_body(kind: int, rows: int) -> Callable[..., None]:
    """Body of outer(w, row_stride, x, blocks, y): y += sum of x[r] * w[r], r in order, over `blocks` blocks of columns.

    For weights stored as [in, out]. `x` and `y` are float; y's blocks are in the order of `load_block`.
    """

    def body(b: ir.IRBuilder, w: ir.Value, row_stride: ir.Value, x: ir.Value, blocks: ir.Value, y: ir.Value) -> None:
        undef = ir.Constant(v16f, ir.Undefined)
        zeros = ir.Constant(v16i, None)
        w_rows, scales = [], []
        for r in range(rows):
            w_rows.append(b.add(w, b.mul(row_stride, i64(r))) if r else w)
            one = b.insert_element(undef, load(b, x, f32, 4 * r), i32(0))
            scales.append(b.shuffle_vector(one, undef, zeros))

        def step(index: ir.Value, _: list) -> list:
            y_at = b.add(y, b.mul(index, i64(BLOCK * 4)))
            offset = b.mul(index, i64(BLOCK * ITEM_BYTES[kind]))
            first, second = load(b, y_at, v16f), load(b, y_at, v16f, 64)
            for row, scale in zip(w_rows, scales, strict=True):
                w_first, w_second = load_block(b, kind, b.add(row, offset))
                first, second = fma(b, w_first, scale, first), fma(b, w_second, scale, second)
            store(b, first, y_at)
            store(b, second, y_at, 64)
            return []

        loop(b, blocks, [], step)

    return body


def outer_tail_body(kind: int) -> Callable[..., None]:
    """Body of outer_tail(w, row_stride, x, cols, rest, y): y[i] = sum of x[c] * w[c, i], c in order, for i < rest.

    What `outer` leaves over: single columns of weights stored as [in, out].
    """

    def body(b: ir.IRBuilder, w: ir.Value, row_stride: ir.Value, x: ir.Value, cols: ir.Value, rest: ir.Value,
             y: ir.Value) -> None:  # fmt: skip
        def one(i: ir.Value, _: list) -> list:
            start = b.add(w, b.mul(i, i64(ITEM_BYTES[kind])))

            def add(c: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
                value = load_one(b, kind, b.add(start, b.mul(c, row_stride)))
                return [b.fadd(sums[0], b.fmul(load(b, b.add(x, b.mul(c, i64(4))), f32), value))]

            (total,) = loop(b, cols, [f32(0.0)], add)
            store(b, total, b.add(y, b.mul(i, i64(4))))
            return []

        loop(b, rest, [], one)

    return body


def interleave_body(b: ir.IRBuilder, y: ir.Value, blocks: ir.Value) -> None:
    """Body of interleave(y, blocks): float blocks of (even, odd) columns to natural order, in place."""

    def step(index: ir.Value, _: list) -> list:
        at_block = b.add(y, b.mul(index, i64(BLOCK * 4)))
        first, second = interleave(b, load(b, at_block, v16f), load(b, at_block, v16f, 64))
        store(b, first, at_block)
        store(b, second, at_block, 64)
        return []

    loop(b, blocks, [], step)


def prepare_body(kind: int, paired: bool) -> Callable[..., None]:
    """Body of prepare(source, count, out): `count` elements of type `kind` to floats, padded with zeros to a block.

    `paired`: each block as even, then odd columns, to meet bfloat16 weights stored as [out, in].
    """

    def body(b: ir.IRBuilder, source: ir.Value, count: ir.Value, out: ir.Value) -> None:
        def step(index: ir.Value, _: list) -> list:
            first, second = load_block(b, kind, b.add(source, b.mul(index, i64(BLOCK * ITEM_BYTES[kind]))))
            if kind == BF16 and not paired:
                first, second = interleave(b, first, second)
            elif kind != BF16 and paired:
                first, second = deinterleave(b, first, second)
            to = b.add(out, b.mul(index, i64(BLOCK * 4)))
            store(b, first, to)
            store(b, second, to, 64)
            return []

        blocks = b.sdiv(count, i64(BLOCK))
        loop(b, blocks, [], step)
        done = b.mul(blocks, i64(BLOCK))
        rest = b.sub(count, done)
        last = b.add(out, b.mul(done, i64(4)))

        def tail(_: ir.Value, __: list) -> list:
            store(b, splat(0.0), last)
            store(b, splat(0.0), last, 64)

            def one(i: ir.Value, _: list) -> list:
                element = b.add(source, b.mul(b.add(done, i), i64(ITEM_BYTES[kind])))
                place = i
                if paired:
                    place = b.add(b.lshr(i, i64(1)), b.mul(b.and_(i, i64(1)), i64(LANES)))
                store(b, load_one(b, kind, element), b.add(last, b.mul(place, i64(4))))
                return []

            loop(b, rest, [], one)
            return []

        loop(b, b.zext(b.icmp_signed(">", rest, i64(0)), i64), [], tail)

    return body


def load_one(b: ir.IRBuilder, kind: int, address: ir.Value) -> ir.Value:
    """One element of type `kind` as a float."""
    if kind == BF16:
        return b.bitcast(b.shl(b.zext(load(b, address, i16), i32), i32(16)), f32)
    return b.fpext(load(b, address, f16), f32) if kind == F16 else load(b, address, f32)


def store_block(b: ir.IRBuilder, kind: int, first: ir.Value, second: ir.Value, address: ir.Value) -> None:
    """32 floats in natural order, rounded to type `kind`, to memory."""
    if kind == BF16:
        even, odd = deinterleave(b, first, second)
        low = b.lshr(to_bf16_bits(b, even), splat(16, v16i))
        store(b, b.or_(low, to_bf16_bits(b, odd)), address)
    elif kind == F16:
        for x, offset in ((first, 0), (second, 32)):
            store(b, b.fptrunc(x, ir.VectorType(f16, LANES)), address, offset)
    else:
        store(b, first, address)
        store(b, second, address, 64)


def store_body(kind: int) -> Callable[..., None]:
    """Body of store(y, count, out): `count` floats rounded to `kind`; y is readable up to a whole block."""

    def body(b: ir.IRBuilder, y: ir.Value, count: ir.Value, out: ir.Value) -> None:
        def step(index: ir.Value, _: list) -> list:
            source = b.add(y, b.mul(index, i64(BLOCK * 4)))
            to = b.add(out, b.mul(index, i64(BLOCK * ITEM_BYTES[kind])))
            store_block(b, kind, load(b, source, v16f), load(b, source, v16f, 64), to)
            return []

        blocks = b.sdiv(count, i64(BLOCK))
        loop(b, blocks, [], step)
        done = b.mul(blocks, i64(BLOCK))
        rest = b.sub(count, done)
        with b.goto_entry_block():
            spare = b.alloca(ir.ArrayType(i8, BLOCK * 4))
        item = i32 if kind == F32 else i16

        def tail(_: ir.Value, __: list) -> list:
            source, address = b.add(y, b.mul(done, i64(4))), b.ptrtoint(spare, i64)
            store_block(b, kind, load(b, source, v16f), load(b, source, v16f, 64), address)

            def one(i: ir.Value, _: list) -> list:
                value = load(b, b.add(address, b.mul(i, i64(ITEM_BYTES[kind]))), item)
                store(b, value, b.add(out, b.mul(b.add(done, i), i64(ITEM_BYTES[kind]))))
                return []

            loop(b, rest, [], one)
            return []

        loop(b, b.zext(b.icmp_signed(">", rest, i64(0)), i64), [], tail)

    return body


def bias_body(kind: int) -> Callable[..., None]:
    """Body of bias(y, bias): one block, y = round(round(y) + bias), both float."""

    def body(b: ir.IRBuilder, y: ir.Value, bias: ir.Value) -> None:
        for offset in (0, 64):
            rounded = round_to(b, kind, load(b, y, v16f, offset))
            store(b, round_to(b, kind, b.fadd(rounded, load(b, bias, v16f, offset))), y, offset)

    return body


def gate_body(activation: int, kind: int, gated: bool) -> Callable[..., None]:
    """Body of gate(g, u, h, paired): one block, h = round(round(act(round(g))) * round(u)), without u if not gated.

    `paired` != 0 writes even, then odd columns, as `prepare` does.
    """

    def body(b: ir.IRBuilder, g: ir.Value, u: ir.Value, h: ir.Value, paired: ir.Value) -> None:
        halves = []
        for offset in (0, 64):
            x = round_to(b, kind, load(b, g, v16f, offset))
            x = round_to(b, kind, ACTIVATIONS[activation](b, x))
            if gated:
                x = round_to(b, kind, b.fmul(x, round_to(b, kind, load(b, u, v16f, offset))))
            halves.append(x)
        even, odd = deinterleave(b, *halves)
        pick = b.icmp_signed("!=", paired, i64(0))
        store(b, b.select(pick, even, halves[0]), h)
        store(b, b.select(pick, odd, halves[1]), h, 64)

    return body


def weigh_body(kind: int, round_product: bool) -> Callable[..., None]:
    """Body of weigh(rows, weights, count, col, blocks, out): out = round(sum of weights[j] * rows[j], j in order).

    `rows` is the address of `count` int64 addresses (0: skipped) of rows of type `kind`, `weights` of as many floats,
    `col` the offset in bytes where to start. `round_product`: each product is rounded to `kind`, as torch does when the
    router's weights have the model's dtype.
    """

    def body(b: ir.IRBuilder, rows: ir.Value, weights: ir.Value, count: ir.Value, col: ir.Value, blocks: ir.Value,
             out: ir.Value) -> None:  # fmt: skip
        undef = ir.Constant(v16f, ir.Undefined)
        zeros = ir.Constant(v16i, None)

        def block(index: ir.Value, _: list) -> list:
            offset = b.add(col, b.mul(index, i64(BLOCK * ITEM_BYTES[kind])))

            def add(j: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
                row = load(b, b.add(rows, b.mul(j, i64(8))), i64)
                one = b.insert_element(undef, load(b, b.add(weights, b.mul(j, i64(4))), f32), i32(0))
                scale = b.shuffle_vector(one, undef, zeros)

                def product(_: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
                    new = []
                    for x, total in zip(load_block(b, kind, b.add(row, offset)), sums, strict=True):
                        weighted = b.fmul(x, scale)
                        new.append(b.fadd(total, round_to(b, kind, weighted) if round_product else weighted))
                    return new

                return loop(b, b.zext(b.icmp_signed("!=", row, i64(0)), i64), sums, product)

            first, second = loop(b, count, [splat(0.0), splat(0.0)], add)
            to = b.add(out, offset)
            if kind == BF16:
                low = b.lshr(to_bf16_bits(b, first), splat(16, v16i))
                store(b, b.or_(low, to_bf16_bits(b, second)), to)
            else:
                store_block(b, kind, first, second, to)
            return []

        loop(b, blocks, [], block)

    return body


_KINDS = (F32, BF16, F16)
Name = tuple[str, *tuple[int, ...]]
DOT_SHAPES = ((4, 1), (1, 1), (2, 2), (1, 2), (1, 3), (1, 4))  # rows and tokens of the dot functions
# Every function there is: number of arguments (all int64) and body.
BODIES: dict[Name, tuple[int, Callable[..., None]]] = {("interleave",): (2, interleave_body)}
for _kind in _KINDS:
    for _rows, _tokens in DOT_SHAPES:
        BODIES["dot", _kind, _rows, _tokens] = 6, dot_body(_kind, _rows, _tokens)
    for _rows in (1, 8):
        BODIES["outer", _kind, _rows] = 5, outer_body(_kind, _rows)
    BODIES["outer_tail", _kind] = 6, outer_tail_body(_kind)
    for _flag in (0, 1):
        BODIES["prepare", _kind, _flag] = 3, prepare_body(_kind, bool(_flag))
        BODIES["weigh", _kind, _flag] = 6, weigh_body(_kind, bool(_flag))
        for _act in range(len(ACTIVATIONS)):
            BODIES["gate", _kind, _act, _flag] = 4, gate_body(_act, _kind, bool(_flag))
    BODIES["store", _kind] = 3, store_body(_kind)
    BODIES["bias", _kind] = 2, bias_body(_kind)

_addresses: dict[Name, int] = {}
_owners: list[Any] = []  # of the code behind the addresses, for the process' life
_lock = threading.Lock()


def addresses(names: Iterable[Name]) -> list[int]:
    """Addresses of the named functions, compiled for this processor on first use (some hundred milliseconds)."""
    names = list(names)
    with _lock:
        new = sorted({name for name in names if name not in _addresses})
        symbols = ["seqmoe_" + "_".join(map(str, name)) for name in new]

        def fill(module: ir.Module) -> None:
            for name, symbol in zip(new, symbols, strict=True):
                num_args, body = BODIES[name]
                function = ir.Function(module, ir.FunctionType(void, [i64] * num_args), symbol)
                b = ir.IRBuilder(function.append_basic_block("entry"))
                body(b, *function.args)
                b.ret_void()

        if new:
            compiled, owner = native.compile_module(fill, symbols)
            _owners.append(owner)
            _addresses.update(zip(new, compiled, strict=True))
        return [_addresses[name] for name in names]
