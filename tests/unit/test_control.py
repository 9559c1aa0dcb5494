"""The control region's protocol against every interleaving of its two sides, word by word.

The explorer runs the real methods: a side is a function of what it has read so far, so that it is run anew up to its
next access of a word, with the answers of before. All states (words, what each side has seen) are visited. With
`buffered`, stores wait in a queue of their side before the other sees them (x86's memory model), which must not matter.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from seqmoe.runtime.control import (
    ALIVE,
    DONE_END,
    DONE_TAKEN,
    DONE_WORDS,
    EPOCH,
    EXPERT,
    HEAD,
    JOB_EPOCH,
    JOB_WORDS,
    JOBS_END,
    JOBS_TAKEN,
    LANDED,
    LINE,
    NO_JOBS,
    PAUSE,
    POSITION,
    STOP,
    TAG,
    ControlRegion,
    Jobs,
    pack_jobs,
    unpack_jobs,
)
from seqmoe.runtime.residency import Fetch
from seqmoe.runtime.schedule import FetchJob
from seqmoe.runtime.worker import FetchWorker

Access = tuple[str, int, int]  # "r" or "w", word, value
Side = Callable[[ControlRegion, list[Any]], None]  # what it does with the region; what it saw goes to the list


class Reached(BaseException):
    """The side is at an access that it has not made yet."""

    def __init__(self, access: Access) -> None:
        self.access = access


class Words:
    """Memory as a side that has made the accesses `past` sees it; from there on it is `memory`, or nothing."""

    def __init__(self, past: tuple[int, ...], memory: list[int] | None = None) -> None:
        self._past, self._at, self._memory = past, 0, memory

    def _access(self, access: Access) -> int:
        if self._at == len(self._past):
            if self._memory is None:
                raise Reached(access)
            kind, word, value = access
            if kind == "w":
                self._memory[word] = value
            return self._memory[word]
        self._at += 1
        return self._past[self._at - 1]

    def __getitem__(self, word: int) -> int:
        return self._access(("r", word, 0))

    def __setitem__(self, word: int, value: int) -> None:
        self._access(("w", word, int(value)))


class Ring:
    """The job ring's entries, copied word by word."""

    def __init__(self, words: Words, jobs: int) -> None:
        self._words, self._jobs = words, jobs

    def __setitem__(self, places: slice, block: Jobs) -> None:
        for place, job in zip(range(*places.indices(self._jobs)), block.tolist(), strict=True):
            for column, value in enumerate(job):
                self._words[HEAD + place * JOB_WORDS + column] = value

    def __getitem__(self, places: np.ndarray) -> Jobs:
        rows = [
            [self._words[HEAD + place * JOB_WORDS + column] for column in range(JOB_WORDS)] for place in places.tolist()
        ]
        return np.array(rows, dtype=np.int64).reshape(-1, JOB_WORDS)


State = tuple[tuple[int, ...], tuple[Any, ...], tuple[tuple[int, ...], ...]]  # words, stores under way, what was read


class Explorer:
    """All that two sides can do to a region of `jobs` jobs and `completions` completions."""

    def __init__(
        self,
        compute: Side,
        worker: Side,
        *,
        jobs: int = 2,
        completions: int = 2,
        region: type[ControlRegion] = ControlRegion,
        begin: int = 0,
        buffered: bool = False,
    ) -> None:
        """`begin`: jobs and completions that have been through the rings before."""
        self.sides, self.buffered = (compute, worker), buffered
        self._made, self._jobs = region(jobs, completions), jobs
        self._steps: dict[tuple[int, tuple[int, ...]], tuple[Access | None, list[Any]]] = {}
        memory = [0] * (ControlRegion.nbytes(jobs, completions) // 8)
        for word in (JOBS_END, JOBS_TAKEN, DONE_END, DONE_TAKEN):
            memory[word] = begin
        self._memory = tuple(memory)
        self.states = 0
        self.writers: dict[int, set[int]] = {}  # sides that write a word

    def _play(self, side: Side, words: Words) -> list[Any]:
        region, seen = self._made, []
        region.words, region._ring = words, Ring(words, self._jobs)  # type: ignore[assignment]
        side(region, seen)
        return seen

    def _step(self, side: int, past: tuple[int, ...]) -> tuple[Access | None, list[Any]]:
        """The access that the side makes after `past`, None at its end; then also what it has seen."""
        known = self._steps.get((side, past))
        if known is None:
            try:
                known = (None, self._play(self.sides[side], Words(past)))
            except Reached as reached:
                known = (reached.access, [])
            self._steps[side, past] = known
        return known

    def run(self, check: Callable[..., None], then: Side | None = None) -> None:
        """`check` gets what both sides have seen, at the end of every way to the end; with `then`, what the worker has seen
        that does this instead, which begins with the same: the rest of it is done alone, after everything."""
        first: State = (self._memory, ((), ()), ((), ()))
        todo, known = [first], {first}
        while todo:
            state = todo.pop()
            self.states += 1
            after = self._next(state)
            if not after:
                memory, _, pasts = state
                seen = [self._step(side, pasts[side])[1] for side in (0, 1)]
                if then is not None:
                    seen.append(self._play(then, Words(pasts[1], list(memory))))
                check(*seen)
            for new in after:
                if new not in known:
                    known.add(new)
                    todo.append(new)

    def _next(self, state: State) -> list[State]:
        memory, buffers, pasts = state
        after: list[State] = []
        for side in (0, 1):
            if buffers[side]:  # the oldest store is seen by the other side
                (word, value), *rest = buffers[side]
                after.append((_put(memory, word, value), _put(buffers, side, tuple(rest)), pasts))
            access, _ = self._step(side, pasts[side])
            if access is None:
                continue
            kind, word, value = access
            if kind == "r":
                own = [stored for where, stored in buffers[side] if where == word]
                got = own[-1] if own else memory[word]
                after.append((memory, buffers, _put(pasts, side, (*pasts[side], got))))
                continue
            self.writers.setdefault(word, set()).add(side)
            past = _put(pasts, side, (*pasts[side], 0))
            if self.buffered:
                after.append((memory, _put(buffers, side, (*buffers[side], (word, value))), past))
            else:
                after.append((_put(memory, word, value), buffers, past))
        return after


def _put(row: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*row[:place], value, *row[place + 1 :])


# -- jobs -----------------------------------------------------------------------------------------------------------


def block(forecast: int, count: int) -> Jobs:
    """Jobs whose words all say which forecast's and which of them they are."""
    numbers = [100 * forecast + i for i in range(count)]
    jobs = pack_jobs([FetchJob(number, number, 0.01 * number) for number in numbers])
    jobs[:, TAG] = numbers
    return jobs


def poster(*counts: int) -> Side:
    """Posts forecasts of so many jobs, one after the other. Sees how many had room."""

    def compute(region: ControlRegion, seen: list[Any]) -> None:
        for forecast, count in enumerate(counts, start=1):
            region.set_position(10 * forecast)
            seen.append(region.post(block(forecast, count)))

    return compute


class Queue:
    """Stands for the prefetcher: keeps the jobs that the worker was given, and sends them in order."""

    def __init__(self, seen: list[Any], send: bool = False) -> None:
        self.seen, self.send = seen, send
        self.jobs: list[FetchJob] = []
        self.position = 0
        self.tag = 0

    def reach(self, position: int) -> None:
        assert position > self.position, f"layer {position} comes after layer {self.position}"
        self.position = position

    def offer_block(self, jobs: Jobs, *, replace: bool) -> None:
        for job in jobs.tolist():
            number = job[EXPERT]
            assert job[1:3] == [-1, number] and job[TAG] == number, f"half a job: {job}"
            assert np.int64(job[3]).view(np.float64) == 0.01 * number and job[JOB_EPOCH] == number // 100, job
        self.jobs = unpack_jobs(jobs) if replace else self.jobs + unpack_jobs(jobs)

    def next(self) -> Fetch | None:
        self.seen.append([job.expert for job in self.jobs])
        if not self.jobs or not self.send:
            return None
        self.tag += 1
        return Fetch(self.jobs.pop(0).expert, 0, -1, self.tag)


class Arrived:
    """A transfer that took no time."""

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None, *, exact: bool = True) -> None:
        pass


def looker(times: int, *, send: bool = False) -> Side:
    """The worker looks so many times, with no lock between the two. Sees what is queued."""

    def worker(region: ControlRegion, seen: list[Any]) -> None:
        queue = Queue(seen, send)
        one = FetchWorker(queue, region, nullcontext(), lambda fetch: Arrived())  # type: ignore[arg-type]
        one._position = 0
        for _ in range(times):
            one.poll()

    return worker


def explore(counts: tuple[int, ...], looks: int = 2, **options: Any) -> tuple[Explorer, set[tuple[int, ...]]]:
    """Posts forecasts of so many jobs while the worker looks: whatever the order, it only ever holds one forecast's jobs,
    never an older one's than before, and in the end the last one's. Returns how many jobs can have had room."""
    explorer = Explorer(poster(*counts), looker(looks), **options)
    rooms: set[tuple[int, ...]] = set()

    def check(room: list[int], held: list[list[int]], at_last: list[list[int]]) -> None:
        assert len(room) == len(counts)
        latest = 0
        for what in held:
            assert len({number // 100 for number in what}) <= 1, f"jobs of two forecasts: {what}"
            for number in what[:1]:
                assert number // 100 >= latest, f"a void job: {number}, after forecast {latest}"
                latest = number // 100
                room_then = room[latest - 1]
                assert what == [100 * latest + i for i in range(len(what))] and len(what) <= room_then, what
        last = len(counts)
        assert at_last[-1] == [100 * last + i for i in range(room[-1])], f"left with {at_last[-1]}, {room} had room"
        rooms.add(tuple(room))

    explorer.run(check, then=looker(looks + 2))
    return explorer, rooms


SMALL = [
    ((2,), {"jobs": 2}),
    ((1, 1), {"jobs": 2}),
    ((2, 1), {"jobs": 3}),
    ((1, 0, 1), {"jobs": 2}),
    ((1, 1), {"jobs": 2, "begin": 5}),  # wraps around
    ((2, 2), {"jobs": 3, "begin": 2}),  # may be full, wraps around within a forecast
    ((1, 2), {"jobs": 1}),
    ((2, 2), {"jobs": 2, "begin": 3}),
]


@pytest.mark.parametrize("buffered", [False, True], ids=["at once", "buffered"])
@pytest.mark.parametrize(("counts", "options"), SMALL, ids=str)
def test_jobs_arrive_whole_and_in_order(counts: tuple[int, ...], options: dict[str, int], buffered: bool) -> None:
    explorer, rooms = explore(counts, **options, buffered=buffered)
    size = options["jobs"]
    assert explorer.states > 500
    assert tuple(min(count, size) for count in counts) in rooms, "with a quick worker there is room"
    assert (len(rooms) > 1) == (sum(counts) > size), "with a slow one the ring is full, if it can be"
    for room in rooms:
        assert all(0 <= had <= count for had, count in zip(room, counts, strict=True))


# -- completions ----------------------------------------------------------------------------------------------------


def completer(count: int) -> Side:
    """Transfers end, one after the other."""

    def worker(region: ControlRegion, seen: list[Any]) -> None:
        for tag in range(1, count + 1):
            region.complete(tag, tag % 3)

    return worker


def taker(times: int) -> Side:
    """Takes so many times what has ended."""

    def compute(region: ControlRegion, seen: list[Any]) -> None:
        for _ in range(times):
            seen += list(region.completed())

    return compute


@pytest.mark.parametrize("buffered", [False, True], ids=["at once", "buffered"])
@pytest.mark.parametrize(("count", "ring", "begin"), [(1, 1, 0), (2, 2, 0), (2, 3, 2), (3, 3, 5)])
def test_completions_arrive_whole_and_once(count: int, ring: int, begin: int, buffered: bool) -> None:
    explorer = Explorer(taker(2), completer(count), completions=ring, begin=begin, buffered=buffered)
    taken: set[int] = set()

    def check(seen: list[Any], _: list[Any]) -> None:
        assert seen == [(tag, tag % 3) for tag in range(1, len(seen) + 1)]
        taken.add(len(seen))

    explorer.run(check)
    assert taken == set(range(count + 1))


def test_a_full_ring_of_completions_is_noticed() -> None:
    with pytest.raises(AssertionError, match="more completions than slots"):
        Explorer(taker(1), completer(3), completions=2).run(lambda *_: None)


# -- both ways ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffered", [False, True], ids=["at once", "buffered"])
def test_jobs_become_transfers_and_come_back(buffered: bool) -> None:
    """The worker sends and completes while compute posts and takes: what comes back was sent, once and in order."""

    def compute(region: ControlRegion, seen: list[Any]) -> None:
        region.post(block(1, 1))
        seen += list(region.completed())
        region.set_position(1)
        region.post(block(2, 1))
        seen += list(region.completed())

    explorer = Explorer(compute, looker(2, send=True), completions=3, begin=1, buffered=buffered)
    most = 0

    def check(landed: list[Any], _: list[Any], held: list[list[int]]) -> None:
        nonlocal most
        sent = [what[0] for what in held if what]
        assert landed == [(tag, LANDED) for tag in range(1, len(landed) + 1)]
        assert len(landed) <= len(sent) <= 2 and sorted(set(sent)) == sent and sent[-1] == 200
        most = max(most, len(landed))

    explorer.run(check, then=looker(4, send=True))
    assert most >= 1


def test_every_word_has_one_writer() -> None:
    """As the module's head has it."""

    def compute(region: ControlRegion, seen: list[Any]) -> None:
        region.set_pause(True)
        poster(1)(region, seen)
        region.set_pause(False)
        seen += list(region.completed())
        region.stop()

    def worker(region: ControlRegion, seen: list[Any]) -> None:
        region.beat()
        looker(3, send=True)(region, seen)
        region.complete(9, LANDED)

    explorer = Explorer(compute, worker, completions=3)
    explorer.run(lambda *_: None)
    assert all(len(sides) == 1 for sides in explorer.writers.values()), explorer.writers
    by_side = [{word for word, sides in explorer.writers.items() if sides == {side}} for side in (0, 1)]
    ring = set(range(HEAD, HEAD + JOB_WORDS))
    assert by_side[0] == {POSITION, PAUSE, EPOCH, JOBS_END, STOP, DONE_TAKEN} | ring
    done = HEAD + 2 * JOB_WORDS
    assert by_side[1] == {JOBS_TAKEN, DONE_END, ALIVE} | set(range(done, done + 2 * DONE_WORDS))
    lines = [{word // LINE for word in side if word < HEAD} for side in by_side]
    assert not lines[0] & lines[1], "words of both sides in one cache line"


def test_paused_nothing_begins() -> None:
    """A worker that looks after the pause sends nothing, in whatever order it sees the rest."""

    def compute(region: ControlRegion, seen: list[Any]) -> None:
        region.set_pause(True)
        poster(1)(region, seen)

    def check(_: list[Any], held: list[list[int]]) -> None:
        assert not any(held), "sent while paused"

    Explorer(compute, looker(3, send=True)).run(check)


# -- the tests can fail ---------------------------------------------------------------------------------------------


class EndFirst(ControlRegion):
    """Raises the end before the entry is there."""

    def post(self, jobs: Jobs) -> int:
        words, size = self.words, self.jobs
        words[EPOCH] = epoch = words[EPOCH] + 1
        end = words[JOBS_END]
        count = min(len(jobs), size - (end - words[JOBS_TAKEN]))
        words[JOBS_END] = end + count
        jobs[:count, JOB_EPOCH] = epoch
        for i in range(count):
            self._ring[(end + i) % size : (end + i) % size + 1] = jobs[i : i + 1]
        return count


class EpochLast(ControlRegion):
    """Raises the epoch when the jobs are there already."""

    def post(self, jobs: Jobs) -> int:
        words, size = self.words, self.jobs
        epoch, end = words[EPOCH] + 1, words[JOBS_END]
        count = min(len(jobs), size - (end - words[JOBS_TAKEN]))
        jobs[:count, JOB_EPOCH] = epoch
        for i in range(count):
            self._ring[(end + i) % size : (end + i) % size + 1] = jobs[i : i + 1]
        words[JOBS_END] = end + count
        words[EPOCH] = epoch
        return count


class TakenFirst(ControlRegion):
    """Gives the entries back before they are read."""

    def take_jobs(self) -> tuple[int, Jobs]:
        words, size = self.words, self.jobs
        taken, end = words[JOBS_TAKEN], words[JOBS_END]
        epoch = words[EPOCH]
        words[JOBS_TAKEN] = end
        found = self._ring[np.arange(taken, end) % size]
        return epoch, found[found[:, JOB_EPOCH] == epoch]


class EpochEarly(ControlRegion):
    """The number of the forecast is read before the end."""

    def take_jobs(self) -> tuple[int, Jobs]:
        epoch = self.words[EPOCH]
        return epoch, super().take_jobs()[1]


class Overrun(ControlRegion):
    """Does not look at what was taken."""

    def post(self, jobs: Jobs) -> int:
        words, size = self.words, self.jobs
        words[EPOCH] = epoch = words[EPOCH] + 1
        end, count = words[JOBS_END], min(len(jobs), size)
        jobs[:count, JOB_EPOCH] = epoch
        for i in range(count):
            self._ring[(end + i) % size : (end + i) % size + 1] = jobs[i : i + 1]
        words[JOBS_END] = end + count
        return count


class DoneFirst(ControlRegion):
    """Raises the end of the completions before the entry is there."""

    def complete(self, tag: int, status: int) -> None:
        end = self.words[DONE_END]
        self.words[DONE_END] = end + 1
        at = self._done_at + end % self.completions * DONE_WORDS
        self.words[at], self.words[at + 1] = tag, status


@pytest.mark.parametrize("wrong", [EndFirst, EpochLast, TakenFirst, EpochEarly, Overrun])
def test_a_wrong_order_is_found(wrong: type[ControlRegion]) -> None:
    with pytest.raises((AssertionError, ValueError, IndexError)):
        for counts, options in SMALL:
            explore(counts, **options, region=wrong)


def test_a_wrong_order_of_completions_is_found() -> None:
    def check(seen: list[Any], _: list[Any]) -> None:
        assert seen == [(tag, tag % 3) for tag in range(1, len(seen) + 1)]

    with pytest.raises(AssertionError):
        Explorer(taker(2), completer(2), region=DoneFirst).run(check)


# -- one after the other --------------------------------------------------------------------------------------------


def test_jobs_travel_unchanged() -> None:
    jobs = [FetchJob(3, 17, 0.25), FetchJob(767, 1 << 40, float(np.float32(0.1))), FetchJob(0, -1, float("inf"))]
    assert unpack_jobs(pack_jobs(jobs)) == jobs
    assert unpack_jobs(pack_jobs([])) == [] and pack_jobs([]).shape == NO_JOBS.shape


def test_random_use_against_a_list() -> None:
    """Rings of many sizes, far beyond one round."""
    rng = np.random.default_rng(0)
    for size in (1, 2, 3, 7, 16):
        region, held, epoch = ControlRegion(size, size), [], 0
        tags: list[tuple[int, int]] = []
        for step in range(400):
            action = rng.integers(4)
            if action == 0:
                count = int(rng.integers(0, 2 * size + 1))
                room = size - len(held)
                jobs = block(step + 1, count)
                assert region.post(jobs) == min(count, room)
                epoch += 1
                held += [(epoch, job.expert) for job in unpack_jobs(jobs[: min(count, room)])]
            elif action == 1:
                number, taken = region.take_jobs()
                assert number == epoch == region.epoch
                assert taken[:, EXPERT].tolist() == [expert for of, expert in held if of == epoch]
                held.clear()
            elif action == 2 and len(tags) < size:
                region.complete(step, step % 3)
                tags.append((step, step % 3))
            elif action == 3:
                assert list(region.completed()) == tags
                tags.clear()


def test_completions_may_be_left_half_way() -> None:
    region = ControlRegion(1, 3)
    for tag in (1, 2, 3):
        region.complete(tag, LANDED)
    for tag, _ in region.completed():
        if tag == 2:
            break
    assert list(region.completed()) == [(3, LANDED)]


def test_a_given_memory() -> None:
    memory = memoryview(bytearray(ControlRegion.nbytes(2, 2)))
    mine, other = ControlRegion(2, 2, memory), ControlRegion(2, 2, memory)
    mine.set_position(5)
    mine.post(block(1, 2))
    assert other.position == 5 and other.take_jobs()[1][:, EXPERT].tolist() == [100, 101]
    with pytest.raises(ValueError, match="the region needs"):
        ControlRegion(3, 2, memory)
    with pytest.raises(ValueError, match="at least one job"):
        ControlRegion(0, 2)
