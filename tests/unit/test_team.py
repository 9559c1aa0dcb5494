"""The decode step's threads: every unit is done once, whoever comes; nobody is inside when a region is over."""

import ctypes
import os
import threading

import numpy as np
import pytest
from llvmlite import ir

from seqmoe.runtime.kernels import native, team
from seqmoe.runtime.kernels.native import get, put, take

UNITS = 64


def fill(a):
    """Work for the tests: adds one to each unit's cell; the counter stands at a, the cells from a + 64 on."""
    while True:
        u = take(a)
        if u >= UNITS:
            break
        put(a + 64 + 8 * u, get(a + 64 + 8 * u) + 1)


def repeat(function, work, a, times, threads):
    """So many regions in a row, without Python in between."""
    for _ in range(times):
        put(a, 0)
        native_parallel(function, work, a, threads)
    return 0


def native_parallel(function, work, a, threads):
    call_parallel(function, work, a, threads, 0)


call_parallel = native.call_parallel


@pytest.fixture(scope="module")
def compiled():
    def emit(module: ir.Module) -> None:
        native.emit(module, (fill, repeat, native_parallel))

    (work, loop), owner = native.compile_module(emit, ("fill", "repeat"))
    call = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 5)(loop)
    yield lambda memory, times, threads: call(
        team.parallel_address(threads), work, int(memory.ctypes.data), times, threads
    )
    del owner


def new_memory() -> np.ndarray:
    return np.zeros(8 + UNITS, dtype=np.int64)


@pytest.mark.parametrize("threads", [1, 2, 4, 9])
def test_every_unit_is_done_once_in_each_region(compiled, threads):
    memory = new_memory()
    with team.at_work():
        compiled(memory, 3000, threads)
    assert (memory[8:] == 3000).all()
    assert memory[0] >= UNITS
    assert team._fields[team.T_WORD] & (team.BYTE | team.OPEN) == 0, "somebody is inside a region that is over"


def test_outside_of_decode_steps_openmp_does_the_work(compiled):
    memory = new_memory()
    compiled(memory, 10, 2)
    before = int(team._fields[team.T_WORD])
    compiled(memory, 10, 2)
    assert (memory[8:] == 20).all()
    assert int(team._fields[team.T_WORD]) == before, "the team has had a region"


def test_two_callers_at_once_do_not_share_a_region(compiled):
    memories = [new_memory() for _ in range(3)]
    with team.at_work():
        callers = [threading.Thread(target=compiled, args=(memory, 2000, 3)) for memory in memories]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    for memory in memories:
        assert (memory[8:] == 2000).all()


def test_members_that_have_fallen_asleep_are_woken_or_done_without(compiled):
    memory = new_memory()
    with team.at_work():
        for i in range(20):
            threading.Event().wait(0.01)  # long enough for every member to sleep
            compiled(memory, 1, 4)
            assert (memory[8:] == i + 1).all()


def test_after_a_late_member_the_caller_works_alone_for_a_while(compiled):
    memory = new_memory()
    with team.at_work():
        compiled(memory, 1, 2)
        before = int(team._fields[team.T_WORD])
        team._fields[team.T_ALONE_UNTIL] = 1 << 62
        try:
            compiled(memory, 5, 2)
        finally:
            team._fields[team.T_ALONE_UNTIL] = 0
        assert (memory[8:] == 6).all()
        assert int(team._fields[team.T_WORD]) == before, "no region was opened"


def test_a_forked_process_gets_members_of_its_own(compiled):
    with team.at_work():
        compiled(new_memory(), 10, 3)
        pid = os.fork()
        if pid == 0:
            memory = new_memory()
            with team.at_work():
                compiled(memory, 100, 3)
            os._exit(0 if (memory[8:] == 100).all() and team._members >= 2 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
