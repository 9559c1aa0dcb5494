"""The fetch worker: a thread that keeps the link busy with what is worth fetching ahead.

What to send is decided by `Prefetcher`, when the link is free; position, pause and jobs come through the control region, and
so does the end of every transfer. The tables are behind one lock, which the worker holds for microseconds: while it decides,
and never while it reads. With nothing to do it sleeps until the bell rings.

    decoding thread                                   worker
    position, pause, jobs -> control region  ------>  poll(): follow them; link free? next() binds a slot, the read begins
    completed() -> land, or fail             <------  complete(tag) when nothing writes to the slot any more
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from seqmoe.profiles.errors import LinkError
from seqmoe.runtime.control import FAILED, LANDED, NO_JOBS, ControlRegion
from seqmoe.runtime.prefetch import Prefetcher
from seqmoe.runtime.residency import Fetch

log = logging.getLogger("seqmoe")

NAP_S = 0.05  # longest sleep, so that an end of the engine is never waited for longer
STALL_S = 60.0  # a transfer that takes longer: the device is dead, or as good as


class Transfer(Protocol):
    """A read under way; link.Ticket is one."""

    def done(self) -> bool:
        """Nothing of it is being read any more, and its time has passed."""

    def wait(self, timeout_s: float | None = None, *, exact: bool = True) -> None:
        """Until then. LinkError if it failed, or if it takes longer."""


@dataclass(slots=True)
class Sent:
    """A fetch on the link, or one that has ended and was not yet taken in."""

    fetch: Fetch
    transfer: Transfer


class FetchWorker:
    """See the module's head. `poll` is one look at everything and may be called without the thread (a virtual clock does)."""

    def __init__(
        self,
        prefetcher: Prefetcher,
        region: ControlRegion,
        lock: threading.Lock,
        send: Callable[[Fetch], Transfer],
    ) -> None:
        """`lock` guards `prefetcher` and its tables; `send` begins to read a fetch's record into its slot."""
        self.prefetcher = prefetcher
        self.region = region
        self.lock = lock
        self.send = send
        self.sent: dict[int, Sent] = {}  # by tag; under the lock
        self.error: BaseException | None = None  # what the thread died of
        self.busy_s = 0.0  # time spent deciding
        self.decisions = 0
        self._on_link: Sent | None = None
        self._position = -1
        self._epoch = 0
        self._bell = threading.Lock()
        self._bell.acquire()
        self._thread: threading.Thread | None = None

    # -- the decoding thread's side -----------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread, also after it has died."""
        if not self.alive:
            self.error = None
            self._thread = threading.Thread(target=self._run, name="seqmoe-fetch", daemon=True)
            self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread is there."""
        return self._thread is not None and self._thread.is_alive()

    def ring(self) -> None:
        """Something changed: look again."""
        if self._bell.locked():
            with suppress(RuntimeError):  # the worker has woken up meanwhile
                self._bell.release()

    def jump(self, position: int) -> None:
        """Under the lock: positions do not go on from the last; the layer at `position` comes next."""
        self._position = position - 1

    def quiesce(self, timeout_s: float = STALL_S) -> bool:
        """Pauses and waits until nothing is on the link; True if it is so. The pause stays."""
        with self.lock:  # whoever decides looks at the pause under it
            self.region.set_pause(True)
        limit = time.perf_counter() + timeout_s
        while self._on_link is not None and time.perf_counter() < limit:
            if not self.alive:
                self._finish_dead()
            time.sleep(0.0005)
        return self._on_link is None

    def reset(self) -> None:
        """After `quiesce`: what was queued or has ended concerned tables that are no longer."""
        with self.lock:
            self.sent.clear()
            for _ in self.region.completed():
                pass
            self.region.post(NO_JOBS)
            self._epoch = self.region.epoch
            self.prefetcher.reset()
            # The interruption may have come between the position and what should have followed it.
            self.prefetcher.start_sequence(self.region.position)
            self.jump(self.region.position)
            self.region.set_pause(False)

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Ends the thread. False if a transfer is under way, at whose end it ends: it touches nothing after that."""
        self.region.stop()
        self.ring()
        limit = time.perf_counter() + timeout_s
        while self._thread is not None and self.alive and time.perf_counter() < limit:
            self._thread.join(NAP_S)
            if self._on_link is not None and not self.lock.locked():
                break
        return not self.alive

    def _finish_dead(self) -> None:
        """The thread died with a transfer under way: whoever waits for it sees to its end."""
        on_link = self._on_link
        if on_link is not None and on_link.transfer.done():
            self._on_link = None

    # -- the worker's side --------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Takes note of what has ended, begins what is worth it. Whether anything is on the link now."""
        on_link = self._on_link
        if on_link is not None:
            if not on_link.transfer.done():
                return True
            self._end(on_link)
        started = time.perf_counter()
        with self.lock:
            self.follow(busy=on_link is not None)
            if not self.region.paused and not self.region.stopped:
                fetch = self.prefetcher.next()
                if fetch is not None:
                    self._begin(fetch)
        self.busy_s += time.perf_counter() - started
        self.decisions += 1
        return self._on_link is not None

    def _begin(self, fetch: Fetch) -> None:
        try:
            transfer = self.send(fetch)
        except BaseException as error:  # nothing was begun, and nobody may believe it was
            self.prefetcher.residency.fail(fetch)
            self.prefetcher.lost(fetch)
            if not isinstance(error, LinkError):
                raise
            log.warning("a fetch could not be begun: %s", error)
            return
        sent = Sent(fetch, transfer)
        self.sent[fetch.tag] = sent
        self._on_link = sent

    def follow(self, busy: bool) -> None:
        """Under the lock: position and jobs as the region has them. `busy`: there has been a transfer on the link since the
        last time."""
        region, prefetcher = self.region, self.prefetcher
        epoch, jobs = region.take_jobs()
        position = region.position  # after the jobs: not before the one that they were made at
        # Before the position: a slot that was bound early, and for which no job is queued, is given back there.
        if epoch != self._epoch or len(jobs):
            prefetcher.offer_block(jobs, replace=epoch != self._epoch)
            self._epoch = epoch
        if position != self._position:
            before, self._position = self._position, position
            # Each layer that went by during a transfer says what the link can do, as it does in the simulator.
            for passed in range(before + 1, position) if busy else ():
                prefetcher.reach(passed)
            prefetcher.reach(position)

    def _end(self, on_link: Sent) -> None:
        try:
            on_link.transfer.wait(0.0)
            status = LANDED
        except LinkError:
            status = FAILED
        self.region.complete(on_link.fetch.tag, status)
        self._on_link = None  # whoever waits for this finds the completion there

    def _run(self) -> None:
        region = self.region
        try:
            while not region.stopped:
                region.beat()
                if not self.poll():
                    self._bell.acquire(timeout=NAP_S)
                    continue
                on_link = self._on_link
                if on_link is not None:
                    self._await(on_link)
        except BaseException as error:  # noqa: BLE001  (the decoding thread says it, and goes on without)
            self.error = error

    def _await(self, on_link: Sent) -> None:
        try:
            on_link.transfer.wait(STALL_S, exact=False)
        except LinkError as error:
            if on_link.transfer.done():
                return  # `_end` says so
            log.warning("a fetch hangs, prefetch stands still until it ends: %s", error)
            while not on_link.transfer.done() and not self.region.stopped:
                time.sleep(NAP_S)
