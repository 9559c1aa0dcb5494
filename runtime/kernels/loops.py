"""The inner loops of the CPU experts kernels as native functions, which `layer.py` calls by address."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

from llvmlite import ir

from seqmoe.runtime.kernels import native
from seqmoe.runtime.kernels.emit import (
    ACTIVATIONS,
    BF16,
    BLOCK,
    F16,
    F32,
    ITEM_BYTES,
    LANES,
    deinterleave,
    f32,
    fma,
    i8,
    i16,
    i32,
    i64,
    interleave,
    load,
    load_block,
    load_one,
    loop,
    prefetch,
    round_to,
    splat,
    store,
    store_block,
    sum_lanes,
    to_bf16_bits,
    v16f,
    v16i,
    void,
)  # fmt: skip

PREFETCH_BYTES = 1024  # how far ahead weights are asked for


def dot_body(kind: int, rows: int, tokens: int) -> Callable[..., None]:
    """Body of dot(w, row_stride, x, cols, out, token_stride, row_step): rows * tokens dot products of `cols` elements.

    `w` is the first row's address, `row_stride` in bytes, `x` the address of `tokens` int64 addresses of prepared
    vectors (float, padded with zeros to whole blocks). Row r of token t goes to out + t * token_stride + r * row_step.
    Callers choose rows far apart, and go on with the next row of each: four streams from memory are half again as fast
    as one, as each has the processor look ahead. With fewer rows, weights are asked for ahead of time.
    """

    def body(b: ir.IRBuilder, w: ir.Value, row_stride: ir.Value, x: ir.Value, cols: ir.Value, out: ir.Value,
             token_stride: ir.Value, row_step: ir.Value) -> None:  # fmt: skip
        w_rows = [b.add(w, b.mul(row_stride, i64(r))) if r else w for r in range(rows)]
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
            if rows < 4:
                for row in w_rows:
                    for line in range(BLOCK * ITEM_BYTES[kind] // 64):
                        prefetch(b, b.add(row, offset), PREFETCH_BYTES + 64 * line)
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
                store(b, sum_lanes(b, sums[r * tokens + t]), b.add(to, b.mul(row_step, i64(r))) if r else to)

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
DOT_SHAPES = ((4, 1), (1, 1), (2, 2), (1, 2), (1, 4))  # rows and tokens of the dot functions
# Every function there is: number of arguments (all int64) and body.
BODIES: dict[Name, tuple[int, Callable[..., None]]] = {("interleave",): (2, interleave_body)}
for _kind in _KINDS:
    for _rows, _tokens in DOT_SHAPES:
        BODIES["dot", _kind, _rows, _tokens] = 7, dot_body(_kind, _rows, _tokens)
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
