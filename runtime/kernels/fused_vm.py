"""The decode machine: runs a stretch of a program of `fused_isa` instructions in one call, with no Python in between.

Each operation is a native function of (address of the instruction, address of the run array), compiled when a program
first needs it and cached on disk by numba: what differs between models is data. Threads come from the OpenMP library that
torch has loaded already, so that there is one pool and not two that spin against each other; they take pieces from a
shared counter, and only for work that outweighs waking them.
"""

import functools
from collections.abc import Callable
from typing import Any

from numba import cfunc, types

from seqmoe.runtime.kernels import fused_isa as isa
from seqmoe.runtime.kernels.fused_attend import attend_heads, attend_latent_head
from seqmoe.runtime.kernels.fused_dense import append, conv, linear_input, linear_rows, matmul, norm
from seqmoe.runtime.kernels.fused_math import (
    OPTIONS,
    call_one,
    call_parallel,
    call_two,
    kernel,
    stamped,
    store_i64,
    take,
)
from seqmoe.runtime.kernels.fused_ops import elementwise, elementwise_int, field, reduce
from seqmoe.runtime.kernels.fused_rows import cumsum, gather, rows, softmax, topk

TILE = 32  # rows of a weight matrix that a thread takes at a time
MIN_ATTEND = 1 << 20  # multiplications in one layer's attention that are worth waking threads for

# The block that threads share: next piece, number of pieces, next thread, instruction, run, linear input, rows a piece.
J_NEXT, J_PIECES, J_THREAD, J_ROW, J_RUN, J_INPUT, J_TILE = 0, 1, 8, 9, 10, 11, 12
JOB_FIELDS = 16
TABLE_FIELDS = 64  # addresses of operations, then (from 32 on) of what their threads do

_OPERATION = types.void(types.int64, types.int64)
_WORK = types.void(types.int64)


@kernel("void(int64, int64, int64, int64, int64, boolean)")
def share(row: int, run: int, x: int, pieces: int, tile: int, worth: bool) -> None:
    """All pieces of an instruction, on several threads where that is `worth` it."""
    threads = field(run, isa.RUN_THREADS)
    work = field(field(run, isa.RUN_TABLE), 32 + field(row, isa.OP))
    job = field(run, isa.RUN_JOB)
    store_i64(job, J_NEXT, 0)
    store_i64(job, J_PIECES, pieces)
    store_i64(job, J_THREAD, 0)
    store_i64(job, J_ROW, row)
    store_i64(job, J_RUN, run)
    store_i64(job, J_INPUT, x)
    store_i64(job, J_TILE, tile)
    if worth and threads > 1 and pieces > 1:
        call_parallel(field(run, isa.RUN_PARALLEL), work, job, threads, 0)
    else:
        call_one(work, job)


@kernel("int64(int64)")
def thread_room(job: int) -> int:
    """Memory of the calling thread alone."""
    run = field(job, J_RUN)
    return field(run, isa.RUN_ROOM) + take(job + 8 * J_THREAD) * field(run, isa.RUN_ROOM_BYTES)


def _linear_work(job: int) -> None:
    row, tile = field(job, J_ROW), field(job, J_TILE)
    number = take(job)
    while number < field(job, J_PIECES):
        linear_rows(row, field(job, J_INPUT), number * tile, min(field(row, isa.SIZES + 1), number * tile + tile))
        number = take(job)


def _attend_work(job: int) -> None:
    room = thread_room(job)
    number = take(job)
    while number < field(job, J_PIECES):
        attend_heads(field(job, J_ROW), field(job, J_RUN), number, room)
        number = take(job)


def _latent_work(job: int) -> None:
    room = thread_room(job)
    number = take(job)
    while number < field(job, J_PIECES):
        attend_latent_head(field(job, J_ROW), field(job, J_RUN), number, room)
        number = take(job)


def _elementwise(row: int, run: int) -> None:
    source = field(row, isa.SOURCE_SLOT)
    elementwise(row, field(run, source - 1) if source > 0 else 0, field(run, isa.RUN_SCRATCH))


def _elementwise_int(row: int, run: int) -> None:
    elementwise_int(row)


def _linear(row: int, run: int) -> None:
    x = linear_input(row, field(run, isa.RUN_SCRATCH))
    n, parallel = field(row, isa.SIZES + 1), field(row, isa.AUX) != 0
    tile = TILE if parallel else n
    share(row, run, x, (n + tile - 1) // tile, tile, parallel)


def _attend(row: int, run: int) -> None:
    length = field(run, isa.RUN_POSITION) + 1
    if field(row, isa.AUX + 6) > 0:
        length = min(length, field(row, isa.AUX + 6))
    products = (
        length * field(row, isa.AUX) * field(row, isa.AUX + 1) * (field(row, isa.AUX + 3) + field(row, isa.AUX + 4))
    )
    share(row, run, 0, field(row, isa.AUX) * field(row, isa.AUX + 2), 1, products > MIN_ATTEND)


def _latent(row: int, run: int) -> None:
    heads = field(row, isa.AUX) * field(row, isa.AUX + 1)
    length = field(run, isa.RUN_POSITION) + 1 + field(row, isa.AUX + 2) + field(row, isa.AUX + 4)
    share(row, run, 0, heads, 1, length * heads * field(row, isa.AUX + 5) > MIN_ATTEND)


def _norm(row: int, run: int) -> None:
    norm(row, field(run, isa.RUN_SCRATCH))


def _reduce(row: int, run: int) -> None:
    reduce(row, field(run, isa.RUN_SCRATCH))


def _append(row: int, run: int) -> None:
    append(row, field(run, isa.RUN_POSITION), field(run, isa.RUN_SCRATCH))


def _softmax(row: int, run: int) -> None:
    softmax(row, field(run, isa.RUN_SCRATCH))


def _topk(row: int, run: int) -> None:
    topk(row, field(run, isa.RUN_SCRATCH))


def _matmul(row: int, run: int) -> None:
    matmul(row)


def _rows(row: int, run: int) -> None:
    rows(row, field(run, isa.RUN_SCRATCH))


def _gather(row: int, run: int) -> None:
    gather(row)


def _cumsum(row: int, run: int) -> None:
    cumsum(row)


def _conv(row: int, run: int) -> None:
    conv(row)


_OPERATIONS: dict[int, Callable[..., None]] = {
    isa.OP_EW: _elementwise, isa.OP_EW_INT: _elementwise_int, isa.OP_LINEAR: _linear, isa.OP_ATTEND: _attend,
    isa.OP_LATENT: _latent, isa.OP_NORM: _norm, isa.OP_REDUCE: _reduce, isa.OP_APPEND: _append, isa.OP_SOFTMAX: _softmax,
    isa.OP_TOPK: _topk, isa.OP_MATMUL: _matmul, isa.OP_ROWS: _rows, isa.OP_GATHER: _gather, isa.OP_CUMSUM: _cumsum,
    isa.OP_CONV: _conv,
}  # fmt: skip
_WORKS: dict[int, Callable[..., None]] = {
    isa.OP_LINEAR: _linear_work, isa.OP_ATTEND: _attend_work, isa.OP_LATENT: _latent_work,
}  # fmt: skip


@functools.cache
def operation(op: int) -> Any:
    """The compiled function of an operation (kept for ever, since programs hold its address)."""
    return cfunc(_OPERATION, **OPTIONS)(stamped(_OPERATIONS[op]))


@functools.cache
def work_of(op: int) -> Any:
    """The compiled function that an operation's threads run, or None."""
    return cfunc(_WORK, **OPTIONS)(stamped(_WORKS[op])) if op in _WORKS else None


@kernel("void(int64, int64, int64, int64)")
def run_program(program: int, first: int, last: int, run: int) -> None:
    """Executes instructions first..last-1 of the program at an address; `run`: address of this step's numbers."""
    table = field(run, isa.RUN_TABLE)
    for pc in range(first, last):
        row = program + pc * isa.WIDTH * 8
        call_two(field(table, field(row, isa.OP)), row, run)
