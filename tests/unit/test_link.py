import ctypes
import errno
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from seqmoe.profiles.errors import LinkError
from seqmoe.profiles.knobs import Knobs
from seqmoe.profiles.spec import LinkSpec
from seqmoe.runtime.link import Link, Request, open_link
from seqmoe.runtime.link_aio import AioQueue
from seqmoe.runtime.link_sources import FileSource, MemorySource
from seqmoe.runtime.pool import Pool
from seqmoe.runtime.probe_link import probe_link

MIB = 1 << 20


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(8, MIB)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def content() -> bytes:
    return np.random.default_rng(5).bytes(5 * MIB + 1234)  # the tail is no multiple of a block


@pytest.fixture
def path(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(content)
    return path


@pytest.fixture
def ram_path(content: bytes) -> Iterator[Path]:
    """A file on tmpfs."""
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no /dev/shm here")
    path = Path(f"/dev/shm/seqmoe-test-{os.getpid()}.bin")
    path.write_bytes(content)
    yield path
    path.unlink(missing_ok=True)


class Gate:
    """A source whose reads wait until `open` is set; counts how many are waiting."""

    name = "gate"
    direct_fd = -1
    nbytes = 1 << 40

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = threading.Semaphore(0)

    def read(self, offset: int, length: int, address: int) -> None:
        self.entered.release()
        self.open.wait(20)
        ctypes.memset(address, 0x7E, length)

    def close(self) -> None:
        pass


def seen(pool: Pool, slot: int, length: int) -> bytes:
    return bytes(pool.memory(slot)[:length])


def has_aio() -> bool:
    try:
        AioQueue(1).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("kind", ["disk", "buffered", "throttled"])
@pytest.mark.parametrize(("threads", "depth", "chunk"), [(1, 1, 64 << 10), (4, 8, 64 << 10), (3, 16, 2 * MIB)])
def test_bytes_arrive(path: Path, pool: Pool, content: bytes, kind: str, threads: int, depth: int, chunk: int) -> None:
    rate = 5e9 if kind == "throttled" else None
    with Link([path], kind=kind, bytes_per_s=rate, read_threads=threads, queue_depth=depth, read_chunk_bytes=chunk) as link:
        rng = np.random.default_rng(0)
        wanted = [int(rng.integers(4 * MIB // 4096)) * 4096 for _ in range(8)]
        requests = [Request(0, offset, 300_000 // 4096 * 4096, pool.slot_address(slot)) for slot, offset in enumerate(wanted)]
        tickets = [link.submit(requests[:5]), link.submit(requests[5:], background=True)]
        for ticket in tickets:
            ticket.wait()
            assert ticket.done()
        for slot, offset in enumerate(wanted):
            assert seen(pool, slot, requests[slot].length) == content[offset : offset + requests[slot].length]
        assert link.stats.bytes_read == sum(request.length for request in requests)
        assert link.stats.busy_s > 0


@pytest.mark.parametrize("depth", [1, 8])
def test_tail_of_a_file_that_ends_within_a_block(path: Path, pool: Pool, content: bytes, depth: int) -> None:
    with Link([path], queue_depth=depth) as link:
        begin = 5 * MIB - 4096
        link.read([Request(0, begin, len(content) - begin, pool.slot_address(0))])
        assert seen(pool, 0, len(content) - begin) == content[begin:]


@pytest.mark.parametrize("depth", [1, 8])
def test_file_cut_while_open(path: Path, pool: Pool, depth: int) -> None:
    with Link([path], queue_depth=depth) as link:
        os.truncate(path, 2 * MIB + 5)
        with pytest.raises(LinkError, match=r"weights.bin: wanted bytes 2093056 to 2101248, but the file ends at 2097157; it had 5244114"):
            link.read([Request(0, 2 * MIB - 4096, 8192, pool.slot_address(0))])
        with pytest.raises(LinkError, match="was changed while it was in use"):
            link.check_unchanged()


def test_file_replaced_while_open_stays_what_it_was(path: Path, pool: Pool, content: bytes) -> None:
    with Link([path]) as link:
        other = path.with_suffix(".new")
        other.write_bytes(bytes(len(content)))
        os.replace(other, path)
        link.read([Request(0, 4096, 8192, pool.slot_address(0))])
        assert seen(pool, 0, 8192) == content[4096 : 4096 + 8192]
        link.check_unchanged()


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LinkError, match=r"nothing.bin: cannot be opened: No such file"):
        Link([tmp_path / "nothing.bin"])


def test_direct_reads_do_not_fill_the_page_cache(path: Path, pool: Pool) -> None:
    """If this fails on a file system that takes O_DIRECT, records are read twice over: once into memory nobody asked for."""
    subprocess.run(["sync", "-f", str(path)], check=True)
    fd = os.open(path, os.O_RDONLY)
    try:
        with Link([path]) as link:
            if not isinstance(link.sources[0], FileSource) or not link.sources[0].direct:
                pytest.skip("this file system refuses O_DIRECT")
            assert link.describe() == "disk (O_DIRECT)"
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            before = cached_bytes(path)
            link.read([Request(0, 0, MIB, pool.slot_address(0))])
            assert cached_bytes(path) <= before
    finally:
        os.close(fd)


def cached_bytes(path: Path) -> int:
    import mmap

    libc = ctypes.CDLL(None)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as map_:
        pages = (ctypes.c_ubyte * (-(-len(map_) // mmap.PAGESIZE)))()
        base = ctypes.addressof(ctypes.c_char.from_buffer(map_))
        assert libc.mincore(ctypes.c_void_p(base), ctypes.c_size_t(len(map_)), pages) == 0
        return bytes(pages).count(1) * mmap.PAGESIZE


def test_refusal_of_direct_reads_is_noted_once(ram_path: Path, pool: Pool, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    # Recent kernels accept O_DIRECT on tmpfs; then the refusal is played.
    real_open = os.open

    def refusing_open(name: object, flags: int, *rest: int, **named: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(name, flags, *rest, **named)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(os, "open", refusing_open)
    with pytest.warns(RuntimeWarning, match="direct reads are refused here") as caught:
        link = Link([ram_path])
    for _ in range(3):
        link.read([Request(0, 4096, 300_000 // 4096 * 4096, pool.slot_address(0))])
    assert seen(pool, 0, 8192) == content[4096 : 4096 + 8192]
    assert len(caught) == len(link.notices) == 1
    assert str(ram_path) in link.notices[0]
    assert link.describe() == "buffered (page cache)"
    link.close()


def test_tmpfs_works_whatever_it_says_to_direct_reads(ram_path: Path, pool: Pool, content: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Link([ram_path]) as link:
            link.read([Request(0, 5 * MIB, 1234, pool.slot_address(0)), Request(0, 0, MIB, pool.slot_address(1))])
            assert seen(pool, 0, 1234) == content[5 * MIB :]
            assert seen(pool, 1, MIB) == content[:MIB]


def test_refusal_in_the_middle_goes_on_through_the_page_cache(path: Path, pool: Pool, content: bytes) -> None:
    with Link([path]) as link:
        source = link.sources[0]
        assert isinstance(source, FileSource)
        if not source.direct:
            pytest.skip("this file system refuses O_DIRECT")
        request = Request(0, 4096, 8192, pool.slot_address(0) + 100)  # no device takes this address: EINVAL
        with pytest.warns(RuntimeWarning, match="direct reads are refused here"):
            source.read(request.offset, request.length, request.address)
        assert bytes(pool.memory(0)[100 : 100 + 8192]) == content[4096 : 4096 + 8192]
        assert not source.direct and source.direct_fd == -1


@pytest.mark.parametrize("depth", [1, 8])
def test_read_error_names_file_place_and_reason(depth: int, pool: Pool) -> None:
    """/proc/self/mem answers EIO where nothing is mapped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        link = Link([Path("/proc/self/mem")], queue_depth=depth)
    ticket = link.submit([Request(0, 4096, 4096, pool.slot_address(0))], describe=lambda request: f"piece at {request.offset}")
    for _ in range(2):
        with pytest.raises(LinkError, match=r"^piece at 4096: /proc/self/mem: bytes 4096 to 8192 cannot be read: Input/output error$"):
            ticket.wait()
    assert ticket.done()
    assert link.close()


def test_error_ends_the_rest_of_its_ticket_and_nothing_else(path: Path, pool: Pool, content: bytes) -> None:
    gate = Gate()
    with Link([path, gate], read_threads=1, queue_depth=1) as link:
        first = link.submit([Request(1, 0, 4096, pool.slot_address(7))])
        gate.entered.acquire(timeout=10)  # the only thread is held up there: the rest is this thread's
        bad = link.submit([Request(0, 8 * MIB, 4096, pool.slot_address(0)), *[Request(1, 0, 4096, pool.slot_address(1))] * 50])
        good = link.submit([Request(0, 0, 4096, pool.slot_address(2))])
        with pytest.raises(LinkError, match="the file ends at"):
            bad.wait(5)  # would take for ever if the fifty reads of the gate were still tried
        good.wait(5)
        assert seen(pool, 2, 4096) == content[:4096]
        gate.open.set()
        first.wait(5)


def test_stalled_read_is_an_error_and_ends_later(pool: Pool) -> None:
    gate = Gate()
    link = Link([gate], read_threads=1)
    ticket = link.submit([Request(0, 0, 4096, pool.slot_address(0))])
    assert gate.entered.acquire(timeout=10)
    began = time.perf_counter()
    with pytest.raises(LinkError, match=r"no answer within 0.1 s: 1 reads of gate are still under way"):
        ticket.wait(0.1)
    assert time.perf_counter() - began < 5
    assert not ticket.done()
    assert not link.drain(0.05)
    assert not link.close(0.05)  # says that memory is still written to
    gate.open.set()
    ticket.wait(10)
    assert seen(pool, 0, 4096) == b"\x7e" * 4096
    assert link.close()


def test_demand_goes_before_background(pool: Pool) -> None:
    gate, order = Gate(), []

    class Log(Gate):
        def read(self, offset: int, length: int, address: int) -> None:
            order.append(offset)

    with Link([gate, Log()], read_threads=1) as link:
        held = link.submit([Request(0, 0, 4096, pool.slot_address(0))])
        assert gate.entered.acquire(timeout=10)
        background = link.submit([Request(1, 4096 * n, 4096, pool.slot_address(1)) for n in range(3)], background=True)
        demand = link.submit([Request(1, 4096 * n, 4096, pool.slot_address(2)) for n in (10, 11)])
        gate.open.set()
        while not (demand.done() and background.done()):  # nobody helps
            time.sleep(0.001)
        held.wait()
    assert order == [4096 * n for n in (10, 11, 0, 1, 2)]


def test_close_with_work_queued_neither_hangs_nor_loses_the_waiters(pool: Pool) -> None:
    gate = Gate()
    link = Link([gate], read_threads=2)
    ticket = link.submit([Request(0, 0, 4096, pool.slot_address(0))] * 40)
    for _ in range(2):
        assert gate.entered.acquire(timeout=10)
    errors: list[BaseException] = []

    def closer() -> None:
        if not link.close(10):
            errors.append(AssertionError("did not stop"))

    thread = threading.Thread(target=closer)
    thread.start()
    while ticket._todo:
        time.sleep(0.001)
    gate.open.set()
    thread.join(20)
    with pytest.raises(LinkError, match="given up: the link was closed"):
        ticket.wait(5)
    assert not errors
    assert link.close() and link.close()
    with pytest.raises(LinkError, match="the link is closed"):
        link.submit([Request(0, 0, 4096, pool.slot_address(0))])


@pytest.mark.parametrize("when", ["others-read", "own-read"])
def test_interrupt_while_waiting(when: str) -> None:
    """Ctrl-C comes through at once, and the process can still close the link and end."""
    code = f"""
import threading, time
from seqmoe.runtime.link import Link, Request
from seqmoe.runtime.pool import Pool

class Slow:
    name, direct_fd, nbytes = "slow", -1, 1 << 30
    def read(self, offset, length, address):
        print("reading", flush=True)
        for _ in range(24):
            time.sleep(0.05)
    def close(self): pass

pool = Pool(1, 4096)
link = Link([Slow()], read_threads=1, queue_depth=1)
ticket = link.submit([Request(0, 0, 4096, pool.address)], inline={when == "own-read"})
try:
    if {when == "others-read"}: time.sleep(0.3)
    ticket.wait()
    print("not interrupted")
except KeyboardInterrupt:
    print("interrupted", link.drain(10), ticket.done(), link.close(), flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "reading\n"
    time.sleep(0.6 if when == "others-read" else 0.2)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    assert out == "interrupted True True True\n"


@pytest.mark.skipif(not has_aio(), reason="no AIO here")
@pytest.mark.parametrize("interrupted", [True, False])
def test_direct_reads_left_under_way_are_seen_to_their_end(path: Path, pool: Pool, content: bytes, interrupted: bool) -> None:
    main = threading.main_thread()

    class Queue(AioQueue):
        def wait(self, timeout_s: float | None = None) -> bool:
            if threading.current_thread() is not main:
                time.sleep(0.2)
                return super().wait(timeout_s)
            if interrupted:
                raise KeyboardInterrupt
            return False

    with Link([path], queue_depth=8) as link:
        if not isinstance(link.sources[0], FileSource) or not link.sources[0].direct:
            pytest.skip("this file system refuses O_DIRECT")
        link._idle_queues.append(Queue(8))
        ticket = link.submit([Request(0, 4096 * n, 4096, pool.slot_address(n)) for n in range(4)], inline=True)
        with pytest.raises(KeyboardInterrupt if interrupted else LinkError):
            ticket.wait(0.05)
        assert not ticket.done()
        assert link.drain(5)
        ticket.wait()
        for n in range(4):
            assert seen(pool, n, 4096) == content[4096 * n : 4096 * (n + 1)]


def test_without_aio_threads_read_one_by_one(path: Path, pool: Pool, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(depth: int) -> AioQueue:
        raise OSError(errno.EAGAIN, "io_setup was refused")

    monkeypatch.setattr("seqmoe.runtime.link.AioQueue", refuse)
    with Link([path], queue_depth=8) as link:
        for _ in range(2):
            link.read([Request(0, 4096 * n, 4096, pool.slot_address(n)) for n in range(8)])
        assert seen(pool, 7, 4096) == content[4096 * 7 : 4096 * 8]
        if isinstance(link.sources[0], FileSource) and link.sources[0].direct:
            assert [notice for notice in link.notices if "no AIO here" in notice] == link.notices != []


def test_throttled_takes_the_time_that_its_rate_says(path: Path, pool: Pool) -> None:
    path.read_bytes()
    with Link([path], kind="throttled", bytes_per_s=200e6, latency_us=100) as link:
        began = time.perf_counter()
        link.submit([Request(0, n % 5 * MIB, MIB, pool.slot_address(n % 8)) for n in range(50)]).wait()
        took = time.perf_counter() - began
        assert 50 * MIB / 200e6 <= took < 50 * MIB / 200e6 * 1.1
        assert link.stats.late_s < 0.02
        assert link.describe().startswith("200.00 MB/s, 100 us (throttled: real copies, held back")


def test_dma_charges_time_and_moves_nothing(path: Path, pool: Pool) -> None:
    with Link([path], kind="dma", bytes_per_s=1e9, latency_us=2000) as link:
        began = time.perf_counter()
        tickets = [link.submit([Request(0, 0, MIB, pool.slot_address(0))]) for _ in range(10)]
        assert not tickets[0].done()
        tickets[-1].wait()
        took = time.perf_counter() - began
        # Transfers follow each other on the wire; the latency comes once, at the end.
        assert 10 * MIB / 1e9 + 0.002 <= took < 10 * MIB / 1e9 + 0.002 + 0.02
        assert all(ticket.done() for ticket in tickets)
        assert pool.resident_bytes() == 0
        assert link.stats.bytes_read == 10 * MIB
        assert link.describe() == "1.00 GB/s, 2000 us (dma: time charged, no bytes moved)"
        with pytest.raises(LinkError, match="no answer within 0.01 s"):
            link.submit([Request(0, 0, 500 * MIB, pool.slot_address(0))]).wait(0.01)


def test_memory_source_copies(pool: Pool) -> None:
    pool.memory(3)[:] = b"\x21" * MIB
    with Link([MemorySource("host", pool.slot_address(3), MIB)], read_chunk_bytes=64 << 10) as link:
        link.read([Request(0, 8192, 200_000 // 4096 * 4096, pool.slot_address(0))])
        assert seen(pool, 0, 196_608) == b"\x21" * 196_608
        assert link.describe() == "memory"


def test_many_threads_share_a_link(path: Path, pool: Pool, content: bytes) -> None:
    failures: list[object] = []

    def user(slot: int) -> None:
        rng = np.random.default_rng(slot)
        for _ in range(60):
            offset = int(rng.integers(4 * MIB // 4096)) * 4096
            length = int(rng.integers(1, 20)) * 4096
            link.read([Request(0, offset, length, pool.slot_address(slot))])
            if seen(pool, slot, length) != content[offset : offset + length]:
                failures.append((slot, offset, length))

    with Link([path], read_threads=3, queue_depth=4, read_chunk_bytes=16384) as link:
        threads = [threading.Thread(target=user, args=(slot,)) for slot in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not failures
        assert not link._active and not any(ticket._todo for ticket in (*link._demand, *link._background))


def test_open_link_takes_the_knobs(path: Path) -> None:
    knobs = Knobs(read_threads=3, queue_depth=5, read_chunk_bytes=128 << 10)
    with open_link([path], LinkSpec.parse("throttled:1GB/s,50us"), knobs) as link:
        assert (link.kind, link.bytes_per_s, round(link.latency_us)) == ("throttled", 1e9, 50)
        assert (len(link._threads), link.queue_depth, link.read_chunk_bytes) == (3, 5, 128 << 10)
    with open_link([path], LinkSpec(), Knobs(direct_io=False)) as link:
        assert link.describe() == "buffered (page cache)" and link.notices == []


def test_probe(path: Path) -> None:
    probe = probe_link([path], 300_000, records_at_once=2, samples=10, seconds=5)
    assert probe.samples == 10
    assert 0 < probe.p10_s <= probe.p50_s <= probe.p90_s
    assert probe.bytes_per_s == 600_000 / probe.p50_s
    with pytest.raises(LinkError, match="no file is as large"):
        probe_link([path], 50 * MIB)
