"""The threads of the decode step: whoever is there works, nobody waits for a thread that has not come.

OpenMP ends every parallel region with all its threads. When another process holds a core, the thread that waits for that
core is late at each of a step's dozens of regions, by the time slice of a scheduler: a step then takes a hundred times
as long. Here a region's units of work are taken from a counter (`native.take`) by the calling thread and by whichever
members of the team come while it is open. The caller closes it when the counter has run out, and waits only for members
that came and still hold a unit. A member waits for the next region awake for a moment, then asleep.

The state of a region is one word, changed atomically:

    bits 0-7   members inside      bits 8-15  members that came      bits 16-23  most that may come
    bit 24     open                bits 25-62 number of the region

so a member enters only while the region is open (compare and swap), and the caller, once it has closed the region and
sees nobody inside, may change what the region reads. A member never enters a region twice.

Outside of decode steps torch computes with its OpenMP threads, which stay awake for milliseconds after every use: there
the team passes its work on to them (`T_AWAKE`), instead of having two sets of threads share the cores.
"""

import ctypes
import functools
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from llvmlite import ir

from seqmoe.runtime.kernels import native
from seqmoe.runtime.kernels.native import (
    add_now,
    call_1,
    call_2,
    call_parallel,
    call_system,
    get,
    get_now,
    pause,
    put,
    swap_if,
    swap_now,
)
from seqmoe.runtime.kernels.openmp import find_openmp

# Fields of the team's memory, in int64; what different threads write lies in different cache lines.
T_WORD, T_WORK, T_DATA, T_BUSY, T_AWAKE, T_OPENMP, T_SYSTEM, T_FUTEX = 0, 8, 9, 16, 17, 18, 19, 20
T_CLOCK, T_NOW, T_ALONE_UNTIL = 21, 22, 48
T_SLEEPING, T_BELL, T_WAITING = 24, 32, 40
NUM_FIELDS = 56

CAME, MOST, OPEN, REGION = 1 << 8, 1 << 16, 1 << 24, 1 << 25
BYTE = 255
MAX_MEMBERS = 127
# Turns of waiting awake, of some 20 to 50 ns each. A member: for the gaps within a step. The caller: for the end of a unit;
# asleep, it leaves its core to the member it waits for, if that has lost its own.
MEMBER_TURNS, CALLER_TURNS = 4000, 1500
# A member that has lost its core keeps the caller waiting for milliseconds. After such a wait the caller works alone for
# so many times as long, so that waits cost a bounded share of the time however busy the machine is.
ALONE_TIMES, MAX_ALONE_NS = 8, 250_000_000
CLOCK_MONOTONIC, NS = 1, 1_000_000_000  # of Linux
FUTEX_WAIT, FUTEX_WAKE = 128, 129  # private to the process
_FUTEX_NUMBER = {"x86_64": 202, "aarch64": 98, "riscv64": 98}  # of the system call


def parallel(work, data, threads, flags):
    """As GOMP_parallel(work, data, threads, flags), for work that takes its units from a counter.

    `work(data)` runs on the calling thread and on at most `threads - 1` others; when it returns all units must be taken.
    """
    t = TEAM
    if get(t + 8 * T_AWAKE) == 0:
        call_parallel(get(t + 8 * T_OPENMP), work, data, threads, flags)
        return
    if threads < 2 or swap_now(t + 8 * T_BUSY, 1) != 0:  # another thread has the team: alone, then
        call_1(work, data)
        return
    if clock(t) < get(t + 8 * T_ALONE_UNTIL):
        call_1(work, data)
        swap_now(t + 8 * T_BUSY, 0)
        return
    put(t + 8 * T_WORK, work)
    put(t + 8 * T_DATA, data)
    word = (get_now(t) & (0 - REGION)) + REGION + OPEN + MOST * min(threads - 1, MAX_MEMBERS)
    swap_now(t, word)
    if get_now(t + 8 * T_SLEEPING) > 0:
        add_now(t + 8 * T_BELL, 1)
        call_system(get(t + 8 * T_SYSTEM), get(t + 8 * T_FUTEX), t + 8 * T_BELL, FUTEX_WAKE, threads - 1, 0, 0, 0)
    call_1(work, data)
    add_now(t, 0 - OPEN)
    turns, slept_from = 0, 0
    while get_now(t) & BYTE:
        pause()
        turns += 1
        if turns > CALLER_TURNS:
            if slept_from == 0:
                slept_from = clock(t)
            swap_now(t + 8 * T_WAITING, 1)
            if get_now(t) & BYTE:
                call_system(get(t + 8 * T_SYSTEM), get(t + 8 * T_FUTEX), t + 8 * T_WAITING, FUTEX_WAIT, 1, 0, 0, 0)
            swap_now(t + 8 * T_WAITING, 0)
    if slept_from > 0:
        now = clock(t)
        put(t + 8 * T_ALONE_UNTIL, now + min(ALONE_TIMES * (now - slept_from), MAX_ALONE_NS))
    swap_now(t + 8 * T_BUSY, 0)


def clock(t):
    """Nanoseconds since some moment."""
    call_2(get(t + 8 * T_CLOCK), CLOCK_MONOTONIC, t + 8 * T_NOW)
    return get(t + 8 * T_NOW) * NS + get(t + 8 * T_NOW + 8)


def member(t):
    """What a member's thread runs, for ever."""
    seen = 0
    while True:
        turns = 0
        while True:
            word = get_now(t)
            if word & OPEN and (word & (0 - REGION)) != seen:  # noqa: SIM102 (the line would be too long)
                if (word // CAME & BYTE) < (word // MOST & BYTE) and swap_if(t, word, word + CAME + 1):
                    break
            pause()
            turns += 1
            if turns > MEMBER_TURNS:
                turns = 0
                add_now(t + 8 * T_SLEEPING, 1)
                bell = get_now(t + 8 * T_BELL)
                word = get_now(t)
                # The caller opens first and looks for sleepers then, so one of the two sees the other.
                if (word & OPEN) == 0 or (word & (0 - REGION)) == seen:
                    call_system(
                        get(t + 8 * T_SYSTEM),
                        get(t + 8 * T_FUTEX),
                        t + 8 * T_BELL,
                        FUTEX_WAIT,
                        bell & WORD_MASK,
                        0,
                        0,
                        0,
                    )
                add_now(t + 8 * T_SLEEPING, -1)
        seen = word & (0 - REGION)
        call_1(get(t + 8 * T_WORK), get(t + 8 * T_DATA))
        add_now(t, -1)
        if get_now(t + 8 * T_WAITING):
            swap_now(t + 8 * T_WAITING, 0)
            call_system(get(t + 8 * T_SYSTEM), get(t + 8 * T_FUTEX), t + 8 * T_WAITING, FUTEX_WAKE, 1, 0, 0, 0)


WORD_MASK = (1 << 32) - 1  # a futex is 32 bits
_memory = np.zeros(NUM_FIELDS + 8, dtype=np.int64)
_fields = _memory[-_memory.ctypes.data % 64 // 8 :][:NUM_FIELDS]
TEAM = int(_fields.ctypes.data)  # a constant of the compiled code
_lock = threading.Lock()
_members = 0


@functools.cache
def _compiled() -> tuple[int, int, Any]:
    def fill(module: ir.Module) -> None:
        native.emit(module, (parallel, clock, member))

    (parallel_at, member_at), owner = native.compile_module(fill, ("parallel", "member"))
    return parallel_at, member_at, owner


def parallel_address(threads: int) -> int:
    """Address of `parallel`, after seeing to it that the team suffices for `threads`; 0 where one thread must do.

    Where this system has no futex that we know, it is OpenMP's own function.
    """
    openmp = find_openmp()
    number = _FUTEX_NUMBER.get(platform.machine()) if platform.system() == "Linux" else None
    if not openmp.available or number is None:
        return openmp.parallel
    _fields[T_OPENMP], _fields[T_FUTEX] = openmp.parallel, number
    libc = ctypes.CDLL(None)
    for field, function in ((T_SYSTEM, libc.syscall), (T_CLOCK, libc.clock_gettime)):
        _fields[field] = ctypes.cast(function, ctypes.c_void_p).value or 0
    address, entry, _ = _compiled()
    _recruit(entry, min(threads - 1, MAX_MEMBERS))
    return address


@contextmanager
def at_work() -> Iterator[None]:
    """Within it `parallel` uses the team, otherwise OpenMP. May be nested."""
    _fields[T_AWAKE] += 1
    try:
        yield
    finally:
        _fields[T_AWAKE] -= 1


def _recruit(entry: int, wanted: int) -> None:
    """Starts threads until there are `wanted` members. They live as long as the process, asleep unless there is work."""
    global _members
    with _lock:
        libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
        while _members < wanted:
            # Not Python threads: they never run Python, so the interpreter need not wait for them at its end.
            if libc.pthread_create(ctypes.byref(thread), None, ctypes.c_void_p(entry), ctypes.c_void_p(TEAM)) != 0:
                return  # no more threads to be had: the others do the work
            libc.pthread_detach(thread)
            _members += 1


def _in_child() -> None:
    """After a fork only the forking thread is there: no member, and nobody inside."""
    global _members
    _members = 0
    _fields[[T_WORD, T_BUSY, T_AWAKE, T_SLEEPING, T_WAITING]] = 0


os.register_at_fork(after_in_child=_in_child)
