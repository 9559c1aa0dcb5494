"""One MoE layer's experts on the CPU as one native call: grouping, up-projection, activation, down-projection, sum.

Everything the call needs stands in one array of int64 (`A_...` are the places in it), so it costs one pointer. Threads
come from `team.py`, and take units of rows from a shared counter: a thread that is held up (another process, a read)
takes fewer, or none. Who computes a row does not change its value.

A pair is a token and one of its experts; pair number = token * k + choice. Pairs are sorted by expert; `place` is a
pair's position among those of the experts computed in this call.
"""

import functools
from typing import Any

from llvmlite import ir

from seqmoe.runtime.kernels import native
from seqmoe.runtime.kernels.emit import BF16, BLOCK, F32
from seqmoe.runtime.kernels.native import (
    call_2,
    call_3,
    call_4,
    call_5,
    call_6,
    call_7,
    call_parallel,
    get,
    get_short,
    put,
    put_short,
    put_word,
    take,
)  # fmt: skip

# Sizes and kinds. A_KIND: of activations, A_WEIGHT_KIND: of weights.
A_K, A_E, A_H, A_I, A_KIND, A_WEIGHT_KIND, A_ACTIVATION, A_GATED = range(8)
# Where a projection lies in a record: gate (or the whole up-projection), up, down.
SEGMENT_FIELDS = 8
S_ROWS, S_VIEW, S_OFFSET, S_TRANSPOSED, S_STRIDE, S_BIAS_VIEW, S_BIAS_OFFSET, S_BIAS_KIND = range(SEGMENT_FIELDS)
A_GATE, A_UP, A_DOWN = 8, 16, 24
# What differs from call to call (in this order: `experts_cpu` packs them together).
A_FLAGS, A_T, A_HIDDEN, A_INDEX, A_WEIGHTS, A_WEIGHTS_KIND, A_ADDRESSES, A_OUT = range(32, 40)
# Tables and scratch memory.
(A_NUM_ACTIVE, A_NUM_VIEWS, A_ORDER, A_STARTS, A_ACTIVE, A_LOCAL, A_X, A_X_STRIDE, A_X_ROWS, A_HB, A_HB_STRIDE,
 A_HB_ROWS, A_Y, A_Y_STRIDE, A_Y_ROWS, A_PROJ, A_PROJ_STRIDE, A_GATED_ROWS, A_GATED_STRIDE, A_WEIGHTS_FLOAT, A_TMP,
 A_SPARE) = range(40, 62)  # fmt: skip
# Threads.
A_THREADS, A_PARALLEL, A_WORKER, A_STAGE, A_UNIT_UP, A_UNIT_DOWN = range(64, 70)
# Counters, each in a cache line of its own.
A_NEXT, A_NEXT_THREAD = 72, 80
# Addresses of `loops`' functions for the sizes and kinds above.
(F_DOT_41, F_DOT_11, F_DOT_22, F_DOT_12, F_DOT_14, F_OUTER_8, F_OUTER_1, F_INTERLEAVE, F_PREPARE_X, F_PREPARE_H,
 F_STORE, F_BIAS, F_GATE, F_WEIGH, F_OUTER_TAIL, F_PREPARE_BIAS, F_PREPARE_WEIGHTS) = range(96, 113)  # fmt: skip
NUM_ARGS = 113

# Flags: the steps a call does.
DO_GROUP, DO_PREPARE, DO_UP, DO_RAW, DO_DOWN, DO_DOWN_INPUT, DO_SUM = (1 << i for i in range(7))

TOKEN_TILE = 64  # tokens of one expert handled in one go
MAX_UNIT = 512  # most rows in a unit
UNIT_BYTES = 128 * 1024  # weights in a unit that are worth a turn at the counter
TMP_BYTES = (2 * TOKEN_TILE + 2) * MAX_UNIT * 4  # for each thread
FEW_TOKENS = 64  # up to here all tokens are prepared at once; beyond, each place has a row of its own
SERIAL_SUM = 1 << 16  # products in the final sum that are not worth waking threads for
SUM_UNIT = 8  # tokens
FOUR_TOKENS_COLS = 1024  # four tokens of so many floats are half of a first-level cache


def arg(a, i):
    return get(a + 8 * i)


def item_bytes(kind):
    return 4 if kind == F32 else 2


def group(a):
    """Sort pairs by expert (counting sort: stable, so by token within an expert). Ids outside [0, E) are left out."""
    pairs, num_experts = arg(a, A_T) * arg(a, A_K), arg(a, A_E)
    index, starts, order, active = arg(a, A_INDEX), arg(a, A_STARTS), arg(a, A_ORDER), arg(a, A_ACTIVE)
    for e in range(num_experts + 1):
        put(starts + 8 * e, 0)
    for s in range(pairs):
        e = get(index + 8 * s)
        if 0 <= e < num_experts:
            put(starts + 8 * (e + 1), get(starts + 8 * (e + 1)) + 1)
    num_active = 0
    for e in range(num_experts):
        count = get(starts + 8 * (e + 1))
        if count > 0:
            put(active + 8 * num_active, e)
            num_active += 1
        put(starts + 8 * (e + 1), get(starts + 8 * e) + count)
    # starts[e] is now where e begins; while filling it is where e's next pair goes, so shift back afterwards.
    for s in range(pairs):
        e = get(index + 8 * s)
        if 0 <= e < num_experts:
            at = get(starts + 8 * e)
            put(order + 8 * at, s)
            put(starts + 8 * e, at + 1)
    for e in range(num_experts, 0, -1):
        put(starts + 8 * e, get(starts + 8 * (e - 1)))
    put(starts, 0)
    put(a + 8 * A_NUM_ACTIVE, num_active)


def paired(a, segment):
    """1 if the projection's input is to be given as even, then odd columns (see `loops.prepare_body`)."""
    return 1 if arg(a, A_WEIGHT_KIND) == BF16 and arg(a, segment + S_TRANSPOSED) == 0 else 0


def place_rows(a):
    """Addresses of each place's input row and hidden row; inputs are prepared if the flags say so."""
    tokens, k, width, kind = arg(a, A_T), arg(a, A_K), arg(a, A_H), arg(a, A_KIND)
    hidden, x, stride, flags = arg(a, A_HIDDEN), arg(a, A_X), arg(a, A_X_STRIDE), arg(a, A_FLAGS)
    if flags & DO_PREPARE and tokens <= FEW_TOKENS:
        for t in range(tokens):
            call_3(arg(a, F_PREPARE_X), hidden + t * width * item_bytes(kind), width, x + t * stride)
    place = 0
    for i in range(arg(a, A_NUM_ACTIVE)):
        e = get(arg(a, A_ACTIVE) + 8 * i)
        put(arg(a, A_LOCAL) + 8 * i, place)
        for at in range(get(arg(a, A_STARTS) + 8 * e), get(arg(a, A_STARTS) + 8 * (e + 1))):
            s = get(arg(a, A_ORDER) + 8 * at)
            row = x + (s // k if tokens <= FEW_TOKENS else place) * stride
            if flags & (DO_UP | DO_RAW) and tokens > FEW_TOKENS:
                call_3(arg(a, F_PREPARE_X), hidden + s // k * width * item_bytes(kind), width, row)
            put(arg(a, A_X_ROWS) + 8 * place, row)
            put(arg(a, A_HB_ROWS) + 8 * place, arg(a, A_HB) + place * arg(a, A_HB_STRIDE))
            put(arg(a, A_Y_ROWS) + 8 * place, arg(a, A_Y) + s * arg(a, A_Y_STRIDE))
            place += 1
    put(arg(a, A_LOCAL) + 8 * arg(a, A_NUM_ACTIVE), place)
    if flags & DO_DOWN_INPUT:
        for p in range(place):
            source = arg(a, A_GATED_ROWS) + p * arg(a, A_GATED_STRIDE)
            call_3(arg(a, F_PREPARE_H), source, arg(a, A_I), arg(a, A_HB) + p * arg(a, A_HB_STRIDE))


def rows_in_order(a, w, stride, rows, cols, x_rows, tokens, out, out_stride):
    """out[t, r] = w[r] . x[t]; tokens outside, so that weights come from memory once, then from the cache."""
    t = 0
    while t < tokens:
        # Four tokens at a time only where their inputs stay in the first-level cache.
        n = 4 if tokens - t >= 4 and cols <= FOUR_TOKENS_COLS else min(2, tokens - t)
        at_once = 4 // n
        many = arg(a, F_DOT_41 if n == 1 else F_DOT_22 if n == 2 else F_DOT_14)
        one = arg(a, F_DOT_11 if n == 1 else F_DOT_12 if n == 2 else F_DOT_14)
        apart, to, xs = rows // at_once, out + t * out_stride, x_rows + 8 * t
        for r in range(apart):
            call_7(many, w + r * stride, apart * stride, xs, cols, to + 4 * r, out_stride, 4 * apart)
        for r in range(apart * at_once, rows):
            call_7(one, w + r * stride, stride, xs, cols, to + 4 * r, out_stride, 4)
        t += n


def rows_transposed(a, w, stride, rows, cols, x_rows, tokens, out, out_stride):
    """The same for weights stored as [in, out]: out[t] = sum of x[t, c] * w[c], c in order, eight at a time."""
    blocks = rows // BLOCK
    tail, size = blocks * BLOCK, item_bytes(arg(a, A_WEIGHT_KIND))
    for t in range(tokens):
        for r in range(tail):
            put_word(out + t * out_stride + 4 * r, 0)
    c = 0
    while c < cols:
        n = 8 if c + 8 <= cols else 1
        outer = arg(a, F_OUTER_8 if n == 8 else F_OUTER_1)
        for t in range(tokens):
            call_5(outer, w + c * stride, stride, get(x_rows + 8 * t) + 4 * c, blocks, out + t * out_stride)
        c += n
    for t in range(tokens):
        to = out + t * out_stride
        if arg(a, A_WEIGHT_KIND) == BF16:
            call_2(arg(a, F_INTERLEAVE), to, blocks)
        if tail < rows:
            x = get(x_rows + 8 * t)
            call_6(arg(a, F_OUTER_TAIL), w + tail * size, stride, x, cols, rows - tail, to + 4 * tail)


def project(a, segment, e, row, rows, cols, x_rows, tokens, out, out_stride, bias_row):
    """`rows` rows of one projection of expert `e` for `tokens` rows of input, as floats, with its bias."""
    kind, stride = arg(a, A_WEIGHT_KIND), arg(a, segment + S_STRIDE)
    views = arg(a, A_ADDRESSES) + 8 * e * arg(a, A_NUM_VIEWS)
    w = get(views + 8 * arg(a, segment + S_VIEW)) + arg(a, segment + S_OFFSET)
    if arg(a, segment + S_TRANSPOSED):
        rows_transposed(a, w + row * item_bytes(kind), stride, rows, cols, x_rows, tokens, out, out_stride)
    else:
        rows_in_order(a, w + row * stride, stride, rows, cols, x_rows, tokens, out, out_stride)
    padded = (rows + BLOCK - 1) // BLOCK * BLOCK
    for t in range(tokens):
        for r in range(rows, padded):
            put_word(out + t * out_stride + 4 * r, 0)
    if arg(a, segment + S_BIAS_VIEW) >= 0:
        source = get(views + 8 * arg(a, segment + S_BIAS_VIEW)) + arg(a, segment + S_BIAS_OFFSET)
        source += row * item_bytes(arg(a, segment + S_BIAS_KIND))
        call_3(arg(a, F_PREPARE_BIAS), source, rows, bias_row)
        for t in range(tokens):
            for r in range(0, padded, BLOCK):
                call_2(arg(a, F_BIAS), out + t * out_stride + 4 * r, bias_row + 4 * r)


def raw_unit(a, segment, column, e, first, last, row, rows, tmp):
    """A unit of the up-projection, rounded, to the buffer that `module._apply_gate` reads."""
    bias_row, size = tmp + 2 * TOKEN_TILE * MAX_UNIT * 4, item_bytes(arg(a, A_KIND))
    for p in range(first, last, TOKEN_TILE):
        tokens = min(TOKEN_TILE, last - p)
        project(a, segment, e, row, rows, arg(a, A_H), arg(a, A_X_ROWS) + 8 * p, tokens, tmp, MAX_UNIT * 4, bias_row)
        for t in range(tokens):
            out = arg(a, A_PROJ) + (p + t) * arg(a, A_PROJ_STRIDE) + (column + row) * size
            call_3(arg(a, F_STORE), tmp + t * MAX_UNIT * 4, rows, out)


def up_unit(a, e, first, last, row, rows, tmp):
    """A unit of gate and up rows and their activation, to the hidden rows."""
    stride, gated = MAX_UNIT * 4, arg(a, A_GATED)
    up, bias_row = tmp + TOKEN_TILE * stride, tmp + 2 * TOKEN_TILE * stride
    pairs = paired(a, A_DOWN)
    for p in range(first, last, TOKEN_TILE):
        tokens = min(TOKEN_TILE, last - p)
        x_rows = arg(a, A_X_ROWS) + 8 * p
        project(a, A_GATE, e, row, rows, arg(a, A_H), x_rows, tokens, tmp, stride, bias_row)
        if gated:
            project(a, A_UP, e, row, rows, arg(a, A_H), x_rows, tokens, up, stride, bias_row)
        for t in range(tokens):
            h = get(arg(a, A_HB_ROWS) + 8 * (p + t)) + 4 * row
            for c in range(0, rows, BLOCK):
                call_4(arg(a, F_GATE), tmp + t * stride + 4 * c, up + t * stride + 4 * c, h + 4 * c, pairs)


def down_unit(a, e, first, last, row, rows, tmp):
    """A unit of rows of the down-projection, rounded, to each pair's row."""
    stride, size = MAX_UNIT * 4, item_bytes(arg(a, A_KIND))
    for p in range(first, last, TOKEN_TILE):
        tokens = min(TOKEN_TILE, last - p)
        h_rows, bias_row = arg(a, A_HB_ROWS) + 8 * p, tmp + 2 * TOKEN_TILE * stride
        project(a, A_DOWN, e, row, rows, arg(a, A_I), h_rows, tokens, tmp, stride, bias_row)
        for t in range(tokens):
            call_3(arg(a, F_STORE), tmp + t * stride, rows, get(arg(a, A_Y_ROWS) + 8 * (p + t)) + row * size)


def sum_tokens(a, first, last):
    """out = sum of each token's experts, by weight, in the order of its choices; ids outside [0, E) add nothing."""
    k, width, kind, spare = arg(a, A_K), arg(a, A_H), arg(a, A_KIND), arg(a, A_SPARE)
    size, whole = item_bytes(kind), width // BLOCK
    for t in range(first, last):
        out, rows = arg(a, A_OUT) + t * width * size, spare + 8 * k * t
        # A token's weights as floats; a token's row has room for what is prepared past its end.
        weights = arg(a, A_WEIGHTS_FLOAT) + 4 * (k + BLOCK) * t
        call_3(arg(a, F_PREPARE_WEIGHTS), arg(a, A_WEIGHTS) + k * t * item_bytes(arg(a, A_WEIGHTS_KIND)), k, weights)
        for j in range(t * k, t * k + k):
            e = get(arg(a, A_INDEX) + 8 * j)
            row = arg(a, A_Y) + j * arg(a, A_Y_STRIDE) if 0 <= e < arg(a, A_E) else 0
            put(rows + 8 * (j - t * k), row)
        call_6(arg(a, F_WEIGH), rows, weights, k, 0, whole, out)
        if whole * BLOCK < width:
            # The last columns are written past the row's end: compute them in the first pair's row, which is padded.
            last_row = arg(a, A_Y) + t * k * arg(a, A_Y_STRIDE)
            call_6(arg(a, F_WEIGH), rows, weights, k, whole * BLOCK * size, 1, last_row)
            for i in range(whole * BLOCK * size, width * size, 2):
                put_short(out + i, get_short(last_row + i))


def up_work(a, tmp):
    """Units of the up-projection, until there are none."""
    num_active, raw = arg(a, A_NUM_ACTIVE), arg(a, A_FLAGS) & DO_RAW
    unit, gate_rows, up_rows = arg(a, A_UNIT_UP), arg(a, A_GATE + S_ROWS), arg(a, A_UP + S_ROWS)
    gate_units = (gate_rows + unit - 1) // unit
    units = gate_units + ((up_rows + unit - 1) // unit if raw else 0)
    while True:
        u = take(a + 8 * A_NEXT)
        if u >= num_active * units:
            break
        i, block = u // units, u % units
        e = get(arg(a, A_ACTIVE) + 8 * i)
        first, last = get(arg(a, A_LOCAL) + 8 * i), get(arg(a, A_LOCAL) + 8 * (i + 1))
        if raw == 0:
            up_unit(a, e, first, last, block * unit, min(unit, gate_rows - block * unit), tmp)
        elif block < gate_units:
            raw_unit(a, A_GATE, 0, e, first, last, block * unit, min(unit, gate_rows - block * unit), tmp)
        else:
            row = (block - gate_units) * unit
            raw_unit(a, A_UP, gate_rows, e, first, last, row, min(unit, up_rows - row), tmp)


def down_work(a, tmp):
    """Units of the down-projection, until there are none."""
    num_active, unit, rows = arg(a, A_NUM_ACTIVE), arg(a, A_UNIT_DOWN), arg(a, A_H)
    units = (rows + unit - 1) // unit
    while True:
        u = take(a + 8 * A_NEXT)
        if u >= num_active * units:
            break
        i, row = u // units, u % units * unit
        e = get(arg(a, A_ACTIVE) + 8 * i)
        first, last = get(arg(a, A_LOCAL) + 8 * i), get(arg(a, A_LOCAL) + 8 * (i + 1))
        down_unit(a, e, first, last, row, min(unit, rows - row), tmp)


def sum_work(a):
    """Each thread's part of a large final sum."""
    tokens = arg(a, A_T)
    while True:
        first = take(a + 8 * A_NEXT) * SUM_UNIT
        if first >= tokens:
            break
        sum_tokens(a, first, min(tokens, first + SUM_UNIT))


def worker(a):
    """What each thread of a stage runs: units from the counter, with scratch memory of its own."""
    stage = arg(a, A_STAGE)
    tmp = arg(a, A_TMP) + take(a + 8 * A_NEXT_THREAD) * TMP_BYTES
    if stage == DO_UP:
        up_work(a, tmp)
    elif stage == DO_DOWN:
        down_work(a, tmp)
    else:
        sum_work(a)


def share(a, stage):
    """One stage of the call, on all threads; it is over when this returns."""
    threads = arg(a, A_THREADS)
    put(a + 8 * A_STAGE, stage)
    put(a + 8 * A_NEXT, 0)
    put(a + 8 * A_NEXT_THREAD, 0)
    if threads > 1:
        call_parallel(arg(a, A_PARALLEL), arg(a, A_WORKER), a, threads, 0)
    else:
        worker(a)


def unit_rows(total_rows, row_bytes, threads, transposed, multiple):
    """Rows in a unit: enough bytes to be worth a turn, few enough that threads end together."""
    if threads == 1 and not transposed:
        return MAX_UNIT
    rows = min(UNIT_BYTES // row_bytes, total_rows // (4 * threads)) if not transposed else total_rows // (2 * threads)
    if transposed:
        rows = max(rows, 128)  # a row of the unit is read a few cache lines at a time
    return max(multiple, min(MAX_UNIT, rows // multiple * multiple))


def run(a):
    """The whole call, on the calling thread; wakes the others where there is work for them."""
    flags, threads = arg(a, A_FLAGS), arg(a, A_THREADS)
    if flags & DO_GROUP:
        group(a)
    if flags & (DO_PREPARE | DO_UP | DO_RAW | DO_DOWN):
        place_rows(a)
    if flags & (DO_UP | DO_RAW | DO_DOWN) and arg(a, A_NUM_ACTIVE) > 0:
        size, active = item_bytes(arg(a, A_WEIGHT_KIND)), arg(a, A_NUM_ACTIVE)
        up_bytes = arg(a, A_H) * size * (2 if arg(a, A_GATED) else 1)
        up_rows = active * arg(a, A_GATE + S_ROWS)
        put(a + 8 * A_UNIT_UP, unit_rows(up_rows, up_bytes, threads, arg(a, A_GATE + S_TRANSPOSED), BLOCK))
        unit = unit_rows(active * arg(a, A_H), arg(a, A_I) * size, threads, arg(a, A_DOWN + S_TRANSPOSED), 8)
        put(a + 8 * A_UNIT_DOWN, unit)
        if flags & (DO_UP | DO_RAW):
            share(a, DO_UP)
        if flags & DO_DOWN:
            share(a, DO_DOWN)
    if flags & DO_SUM:
        if threads == 1 or arg(a, A_T) * arg(a, A_K) * arg(a, A_H) <= SERIAL_SUM:
            sum_tokens(a, 0, arg(a, A_T))
        else:
            share(a, DO_SUM)


_FUNCTIONS = (arg, item_bytes, group, paired, place_rows, rows_in_order, rows_transposed, project, raw_unit, up_unit,
              down_unit, sum_tokens, up_work, down_work, sum_work, worker, share, unit_rows, run)  # fmt: skip


@functools.cache
def compiled() -> tuple[int, int, Any]:
    """Addresses of the native functions `run` and `worker`, each `int64_t f(int64_t *args)`, and their owner."""

    def fill(module: ir.Module) -> None:
        native.emit(module, _FUNCTIONS)

    (run_address, worker_address), owner = native.compile_module(fill, ("run", "worker"))
    return run_address, worker_address, owner
