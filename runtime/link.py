"""A link: brings bytes from files to addresses with a few threads that never hold the interpreter lock while reading.

`submit` takes the requests of one or more records and gives a `Ticket`; the thread that waits on a ticket reads as well,
so that small records cost no hand-over between threads. A thread takes up to `queue_depth` requests at a time and gives them
to the kernel together (Linux AIO); where there is no AIO, or for `queue_depth` 1, it reads one after the other.

Kinds: `disk` (O_DIRECT; where that is refused, through the page cache with one notice a file), `buffered` (page cache),
`throttled` (real copies out of the page cache, held back to a rate and a latency), `dma` (nothing is moved, only time is charged: whoever uses
it has the bytes in place).
"""

import errno
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, Self

from seqmoe.profiles.errors import LinkError
from seqmoe.profiles.knobs import Knobs
from seqmoe.profiles.sizes import format_rate
from seqmoe.profiles.spec import LinkSpec
from seqmoe.runtime.extents import ALIGN, round_up
from seqmoe.runtime.link_aio import AioQueue
from seqmoe.runtime.link_sources import FileSource, Source

STALL_S = 60.0  # a link on which nothing at all arrives for so long is taken for dead
_SMALL_BYTES = 1 << 20  # a single read up to this size is over sooner without AIO
_SPIN_S = 150e-6  # sleeping is only this exact


class Request(NamedTuple):
    """`length` bytes at `offset` of source `source` go to memory at `address`.

    `offset` and `address` are multiples of 4096. The memory up to `length` rounded up to 4096 belongs to the request: a direct
    read may write beyond `length`. `length` itself ends where the file ends, or at a multiple of 4096.
    """

    source: int  # index into the link's sources
    offset: int  # bytes
    length: int  # bytes
    address: int


@dataclass(frozen=True)
class LinkStats:
    """What a link has done since it was opened."""

    bytes_read: int  # bytes that requests asked for; for `dma`: that were charged
    requests: int
    busy_s: float  # time with at least one request being read; throttled and dma: time that bytes take at the given rate
    late_s: float  # throttled: by how much the copies themselves came later than the given rate allows, over all tickets


class Ticket:
    """Requests submitted together. `done` and `wait` may be called from any thread, `wait` as often as wanted."""

    __slots__ = ("_describe", "_due", "_error", "_finished", "_left", "_link", "_todo", "nbytes")

    def __init__(
        self,
        link: "Link",
        requests: Sequence[Request],
        nbytes: int,
        due: float = 0.0,
        describe: Callable[[Request], str] | None = None,
    ) -> None:
        self.nbytes = nbytes
        self._link = link
        self._todo = deque(requests)  # not begun
        self._left = len(requests)  # not finished
        self._due = due  # perf_counter time before which it is not done
        self._error: LinkError | None = None
        self._describe = describe
        self._finished = threading.Lock()  # held until no request is left
        if requests:
            self._finished.acquire()

    def done(self) -> bool:
        """True once nothing of it will be read any more: all arrived, or it failed. Then `wait` does not block."""
        return self._left == 0 and (self._due == 0.0 or time.perf_counter() >= self._due)

    def wait(self, timeout_s: float | None = None, *, exact: bool = True) -> None:
        """Reads what nobody has begun to read, waits for the rest. Not `exact`: it may be over some 100 us late, but costs
        no waiting awake.

        Raises LinkError if a read failed (file, offset, reason; no other request of this ticket is then under way), or if
        it takes longer than `timeout_s`, or, without a timeout, if nothing arrives on the link for a minute. In these last two
        cases the memory must not be used again until `done()`. A read by this very thread without AIO is not interrupted.
        """
        try:
            self._wait(timeout_s, exact)
        except Exception:
            raise
        except BaseException:
            self._link._interrupted(self)
            raise

    def _wait(self, timeout_s: float | None, exact: bool) -> None:
        link = self._link
        deadline = None if timeout_s is None else time.perf_counter() + timeout_s
        while self._todo and (batch := link._take(self)):
            link._read(batch, STALL_S if deadline is None else max(0.0, deadline - time.perf_counter()))
        while self._left:
            before = link._completed
            limit = STALL_S if deadline is None else max(0.0, deadline - time.perf_counter())
            if self._finished.acquire(timeout=limit):
                self._finished.release()
                break
            if deadline is not None or link._completed == before:
                self._raise_stalled(limit if timeout_s is None else timeout_s)
        if self._error is not None:
            raise self._error
        if self._due:
            if deadline is not None and self._due > deadline:
                _sleep_until(deadline)
                self._raise_stalled(timeout_s or 0.0)
            if exact:
                _sleep_until(self._due)
            else:
                time.sleep(max(0.0, self._due - time.perf_counter()))

    def _raise_stalled(self, seconds: float) -> None:
        names = ", ".join(source.name for source in self._link.sources[:2])
        raise LinkError(f"no answer within {seconds:g} s: {self._left} reads of {names} are still under way; is the device alive?")


class _Batch:
    """Requests of one ticket that one thread has taken on: `requests` are those that are not over."""

    __slots__ = ("queue", "requests", "thread", "ticket")

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.requests: list[Request] = []
        self.thread = threading.get_ident()
        self.queue: AioQueue | None = None  # where the kernel may be at work on them


def _sleep_until(due: float) -> None:
    while (rest := due - time.perf_counter()) > 0:
        time.sleep(rest - _SPIN_S if rest > _SPIN_S else 0)


class Link:
    """Reads of `sources` by `read_threads` threads and whoever waits. Several threads may use it. See the module's head.

    `bytes_per_s` and `latency_us` are for `throttled` and `dma`: the transfers of one link follow each other at the full
    rate, and each arrives `latency_us` after its last byte was sent; transfers that queue do not add latencies up.
    """

    def __init__(
        self,
        sources: Sequence[Path | Source],
        *,
        kind: str = "disk",
        bytes_per_s: float | None = None,
        latency_us: float = 0.0,
        read_threads: int = 4,
        queue_depth: int = 8,
        read_chunk_bytes: int = 2 << 20,
        direct_io: bool = True,
    ) -> None:
        assert read_chunk_bytes > 0 and read_chunk_bytes % ALIGN == 0, read_chunk_bytes
        assert (bytes_per_s is not None) == (kind in ("throttled", "dma")), (kind, bytes_per_s)
        self.kind = kind
        self.bytes_per_s = bytes_per_s
        self.latency_us = latency_us
        self.queue_depth = queue_depth
        self.read_chunk_bytes = read_chunk_bytes
        self.notices: list[str] = []
        self.sources: list[Source] = []
        self._lock = threading.Lock()
        self._idle_queues: list[AioQueue] = []
        self._hints: SimpleQueue[bool] = SimpleQueue()  # True: there may be requests to take; False: stop
        self._demand: deque[Ticket] = deque()
        self._background: deque[Ticket] = deque()
        self._closed = False
        self._completed = self._bytes = 0
        self._active: set[_Batch] = set()  # what is being read
        self._busy_since = self._busy_s = self._late_s = 0.0
        self._free_at = 0.0  # throttled and dma: when the last byte of all that was submitted will have been sent
        # A throttled link that waited for the disk would not be what it says: its copies come from the page cache.
        direct = direct_io and kind == "disk"
        try:
            for source in sources:
                if isinstance(source, Path):
                    source = FileSource(source, direct=direct, notices=self.notices)
                self.sources.append(source)
        except LinkError:
            self._close_sources()
            raise
        self._threads = [
            threading.Thread(target=self._work, name=f"seqmoe-read-{n}", daemon=True)
            for n in range(0 if kind == "dma" else read_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        requests: Sequence[Request],
        *,
        inline: bool = False,
        background: bool = False,
        describe: Callable[[Request], str] | None = None,
    ) -> Ticket:
        """Begins to read. Requests longer than `read_chunk_bytes` are read in pieces.

        `inline`: the caller waits at once, and the first `queue_depth` pieces are left to it. `background`: goes after all that is not.
        `describe` puts words before an error's message, for the request (piece) that failed.
        """
        if self._closed:
            raise LinkError("the link is closed")
        pieces, nbytes = self._cut(requests)
        due = self._charge(len(pieces), nbytes) if self.bytes_per_s else 0.0
        if self.kind == "dma":
            return Ticket(self, (), nbytes, due)
        ticket = Ticket(self, pieces, nbytes, due, describe)
        if inline and len(pieces) == 1:
            return ticket
        direct = sum(self.sources[piece.source].direct_fd >= 0 for piece in pieces) if self.queue_depth > 1 else 0
        helpers = len(pieces) - direct - (-direct // self.queue_depth) - inline
        if helpers > 0:
            with self._lock:
                (self._background if background else self._demand).append(ticket)
            for _ in range(min(helpers, len(self._threads))):
                self._hints.put(True)
        return ticket

    def read(self, requests: Sequence[Request], timeout_s: float | None = None) -> None:
        """`submit` and `wait` in one."""
        self.submit(requests, inline=True).wait(timeout_s)

    def add_source(self, source: Source) -> int:
        """Another source; returns its index for requests."""
        self.sources.append(source)
        return len(self.sources) - 1

    def describe(self) -> str:
        """What this link is, in a few words, for every output that its numbers go into."""
        if self.kind == "dma":
            return f"{self._rate()} (dma: time charged, no bytes moved)"
        if self.kind == "throttled":
            late = self.stats.late_s
            return f"{self._rate()} (throttled: real copies, held back" + (f", {late:.3f} s late in all)" if late > 0.001 else ")")
        files = [source for source in self.sources if isinstance(source, FileSource)]
        direct = sum(source.direct for source in files)
        if files and direct == len(files):
            return "disk (O_DIRECT)"
        if direct:
            return f"disk (O_DIRECT for {direct} of {len(files)} files, page cache for the rest)"
        return "buffered (page cache)" if files else "memory"

    def _rate(self) -> str:
        return f"{format_rate(self.bytes_per_s or 0.0)}, {self.latency_us:g} us"

    @property
    def stats(self) -> LinkStats:
        with self._lock:
            running = self._active and not self.bytes_per_s
            busy = self._busy_s + (time.perf_counter() - self._busy_since if running else 0.0)
            return LinkStats(self._bytes, self._completed, busy, self._late_s)

    def check_unchanged(self) -> None:
        """Raises LinkError if a file was written to since it was opened: what was read may be of two minds."""
        for source in self.sources:
            if isinstance(source, FileSource):
                source.check_unchanged()

    def drain(self, timeout_s: float = STALL_S) -> bool:
        """Drops what nobody has begun to read, waits for the rest. True: no thread of this link writes to memory now.

        For use after an interruption, before slots of abandoned tickets are used again; their tickets fail.
        """
        self._drop_queued("dropped")
        self._forget_own()
        limit = time.perf_counter() + timeout_s
        while self._active and time.perf_counter() < limit:
            time.sleep(0.001)
        return not self._active

    def close(self, timeout_s: float = 5.0) -> bool:
        """Stops the threads. Idempotent. False if a read does not end: then memory it writes to must stay mapped."""
        self._closed = True
        self._drop_queued("the link was closed")
        for _ in self._threads:
            self._hints.put(False)
        limit = time.perf_counter() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, limit - time.perf_counter()))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        stopped = not self._threads and self.drain(max(0.0, limit - time.perf_counter()))
        if stopped:
            self._close_sources()
        return stopped

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The rest is between Link and Ticket.

    def _cut(self, requests: Sequence[Request]) -> tuple[list[Request], int]:
        """The requests in pieces of at most `read_chunk_bytes`, and their bytes."""
        chunk, nbytes = self.read_chunk_bytes, 0
        pieces = []
        for request in requests:
            source, offset, length, address = request
            assert offset % ALIGN == 0 and address % ALIGN == 0 and length > 0, request
            nbytes += length
            if length <= chunk:
                pieces.append(request)
                continue
            for begin in range(0, length, chunk):
                pieces.append(Request(source, offset + begin, min(chunk, length - begin), address + begin))
        return pieces, nbytes

    def _charge(self, pieces: int, nbytes: int) -> float:
        """Puts them on the virtual wire, after all that is on it; returns when the last one arrives."""
        assert self.bytes_per_s
        now = time.perf_counter()
        with self._lock:
            self._free_at = max(now, self._free_at) + nbytes / self.bytes_per_s
            self._busy_s += nbytes / self.bytes_per_s
            if self.kind == "dma":
                self._bytes += nbytes
                self._completed += pieces
            return self._free_at + self.latency_us * 1e-6 if nbytes else 0.0

    def _work(self) -> None:
        while self._hints.get():
            while (taken := self._take_any()) is not None:
                self._read(taken, None)

    def _take(self, ticket: Ticket) -> _Batch | None:
        with self._lock:
            return self._begin(ticket) if ticket._todo else None

    def _take_any(self) -> _Batch | None:
        with self._lock:
            for queue in (self._demand, self._background):
                while queue:
                    ticket = queue[0]
                    if ticket._todo:
                        return self._begin(ticket)
                    queue.popleft()
        return None

    def _begin(self, ticket: Ticket) -> _Batch:
        """Under the lock: the next request, with as many more as AIO may read together with it."""
        todo, sources, batch = ticket._todo, self.sources, _Batch(ticket)
        if not self._active:
            self._busy_since = time.perf_counter()
        # Noted before it is taken: an interruption between the two finds it twice rather than nowhere.
        self._active.add(batch)
        batch.requests.append(todo[0])
        todo.popleft()
        if sources[batch.requests[0].source].direct_fd >= 0:
            while todo and len(batch.requests) < self.queue_depth and sources[todo[0].source].direct_fd >= 0:
                batch.requests.append(todo[0])
                todo.popleft()
        return batch

    def _read(self, batch: _Batch, timeout_s: float | None) -> None:
        """Reads `batch`. What is still under way after `timeout_s`, or when Ctrl-C comes, is seen to its end elsewhere."""
        requests = list(batch.requests)
        if len(requests) == 1 and requests[0].length <= _SMALL_BYTES:
            self._read_one(batch, requests[0])
            return
        queue = self._aio_queue() if self.queue_depth > 1 else None
        fds = [self.sources[request.source].direct_fd for request in requests]
        if queue is None or min(fds) < 0:
            for request in requests:
                self._read_one(batch, request)
            return
        batch.queue = queue
        over: bool | None = None
        try:
            queue.submit([(fd, r.offset, round_up(r.length), r.address) for fd, r in zip(fds, requests, strict=True)])
            over = queue.wait(timeout_s)
        finally:
            if over:
                self._collect(batch, requests, queue)
            else:
                self._collect_elsewhere(batch, queue, sure=over is not None)

    def _aio_queue(self) -> AioQueue | None:
        try:
            return self._idle_queues.pop()
        except IndexError:
            pass
        try:
            return AioQueue(self.queue_depth)
        except OSError as error:
            self.notices.append(f"no AIO here ({error}): one read at a time for each of the threads")
            self.queue_depth = 1
            return None

    def _collect_elsewhere(self, batch: _Batch, queue: AioQueue, *, sure: bool) -> None:
        batch.thread = 0
        arguments = (batch, list(batch.requests), queue, sure)
        threading.Thread(target=self._collect, args=arguments, daemon=True).start()

    def _collect(self, batch: _Batch, requests: list[Request], queue: AioQueue, sure: bool = True) -> None:
        """The end of `batch`. Not `sure`: the queue was interrupted and may not know what the kernel was given."""
        if sure:
            queue.wait()
            results = queue.results
        else:
            queue.close()  # waits for whatever is under way
            results = [-errno.EAGAIN] * len(requests)
        batch.queue = None  # the kernel is through with it
        if sure:
            self._idle_queues.append(queue)
        for request, result in zip(requests, results, strict=True):
            if result >= request.length:
                self._finish(batch, request, None)
            else:
                self._read_one(batch, request)  # refused, short or failed: once more, the way that knows what to do

    def _read_one(self, batch: _Batch, request: Request) -> None:
        error: LinkError | None = LinkError("the read was interrupted")  # stays if Ctrl-C ends this thread's part
        try:
            self.sources[request.source].read(request.offset, request.length, request.address)
            error = None
        except LinkError as failure:
            error = failure
        finally:
            self._finish(batch, request, error)

    def _finish(self, batch: _Batch, request: Request, error: LinkError | None) -> None:
        ticket = batch.ticket
        if error is not None and ticket._describe is not None:
            error = LinkError(f"{ticket._describe(request)}: {error}")
        with self._lock:
            now = time.perf_counter()
            batch.requests.remove(request)
            if not batch.requests:
                self._put_away(batch, now)
            self._completed += 1
            if error is None:
                self._bytes += request.length
            self._settle(ticket, 1, error)
            if ticket._left == 0 and ticket._due:
                self._late_s += max(0.0, now - ticket._due)

    def _put_away(self, batch: _Batch, now: float) -> None:
        """Under the lock: nothing of `batch` is being read any more."""
        self._active.discard(batch)
        if not self._active and not self.bytes_per_s:
            self._busy_s += now - self._busy_since

    def _interrupted(self, ticket: Ticket) -> None:
        """Ctrl-C came while this thread waited for `ticket`, perhaps between two updates here: the books are put right."""
        self._forget_own()
        with self._lock:
            left = len(ticket._todo) + sum(len(batch.requests) for batch in self._active if batch.ticket is ticket)
            if left < ticket._left:  # some were given up in mid-read
                ticket._error = ticket._error or LinkError("the read was interrupted")
                left -= len(ticket._todo)
                ticket._todo.clear()
            ticket._left = left
            if not left and ticket._finished.locked():
                ticket._finished.release()

    def _forget_own(self) -> None:
        """This thread reads nothing now, whatever it was at when it was interrupted; the kernel may still do so for it."""
        own, now = threading.get_ident(), time.perf_counter()
        with self._lock:
            for batch in [batch for batch in self._active if batch.thread == own]:
                if batch.queue is None:
                    self._put_away(batch, now)
                else:
                    self._collect_elsewhere(batch, batch.queue, sure=False)

    def _settle(self, ticket: Ticket, finished: int, error: LinkError | None) -> None:
        """Under the lock: `finished` requests of the ticket are over; an error also ends those that nobody has begun."""
        if error is not None:
            ticket._error = ticket._error or error
            finished += len(ticket._todo)
            ticket._todo.clear()
        ticket._left -= finished
        if ticket._left == 0 and finished and ticket._finished.locked():
            ticket._finished.release()

    def _drop_queued(self, why: str) -> None:
        with self._lock:
            for ticket in (*self._demand, *self._background):
                if ticket._todo:
                    self._settle(ticket, 0, LinkError(f"the read was given up: {why}"))
            self._demand.clear()
            self._background.clear()

    def _close_sources(self) -> None:
        while self._idle_queues:
            self._idle_queues.pop().close()
        for source in self.sources:
            source.close()


def open_link(sources: Sequence[Path | Source], spec: LinkSpec, knobs: Knobs) -> Link:
    """The link that `spec` names, with the knobs' threads and sizes."""
    return Link(
        sources,
        kind=spec.kind,
        bytes_per_s=spec.bytes_per_s,
        latency_us=spec.latency_us,
        read_threads=knobs.read_threads,
        queue_depth=knobs.queue_depth,
        read_chunk_bytes=knobs.read_chunk_bytes,
        direct_io=knobs.direct_io,
    )
