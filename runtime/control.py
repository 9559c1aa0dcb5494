"""The control region: how the side that computes and the fetch worker speak to each other. One block of words, no locks.

Every word of 8 bytes has one writer, `compute` (the decoding thread; on CUDA the GPU) or `worker` (the fetch thread), and is
written whole. Words that different sides write lie in different cache lines.

    word          writer   meaning
    POSITION      compute  step * L + layer of the layer at work; only ascends within a sequence
    PAUSE         compute  not 0: on-demand loads have the link, begin nothing
    EPOCH         compute  number of the latest forecast; jobs of earlier ones are void
    JOBS_END      compute  jobs written so far; job n is at n % ring of the job ring
    STOP          compute  not 0: end
    JOBS_TAKEN    worker   jobs read so far
    DONE_END      worker   completions written so far
    ALIVE         worker   grows whenever the worker looks; the watchdog's
    DONE_TAKEN    compute  completions read so far

    job:          expert, slot (-1: bound when the transfer starts), deadline, confidence (bits of a double), tag, epoch
    completion:   tag, status (LANDED, FAILED or DROPPED)

Why the order is safe: a writer fills an entry first and raises the end after it, a reader reads the end first and the entries
below it after, so that no entry is read half written; stores of one side are seen by the other in the order in which they were
made (one core after another on x86; elsewhere, and on a GPU, a release fence stands before the end's store and an acquire
fence after its load). A ring is never overrun: the writer of jobs looks at JOBS_TAKEN and leaves out what does not fit, its
least urgent jobs; completions number at most the slots. A tag is written back once, when the worker will write no more to the
slot; a tag that the tables no longer know changes nothing. EPOCH is raised before the jobs of its forecast, so that a worker
that sees the new number and not yet the jobs sends nothing rather than something void.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from seqmoe.runtime.schedule import FetchJob

LINE = 8  # words of a cache line
POSITION, PAUSE, EPOCH, JOBS_END, STOP = (i * LINE for i in range(5))
JOBS_TAKEN, DONE_END, ALIVE = (i * LINE for i in range(5, 8))
DONE_TAKEN = 8 * LINE
HEAD = 9 * LINE  # words before the job ring
JOB_WORDS, DONE_WORDS = 6, 2
EXPERT, SLOT, DEADLINE, CONFIDENCE, TAG, JOB_EPOCH = range(JOB_WORDS)  # columns of a job
LANDED, FAILED, DROPPED = range(3)

Jobs = NDArray[np.int64]  # [n, JOB_WORDS]
NO_JOBS: Jobs = np.zeros((0, JOB_WORDS), dtype=np.int64)


def pack_jobs(jobs: Sequence[FetchJob]) -> Jobs:
    """Jobs as they travel; slots are bound when transfers start."""
    block = np.zeros((len(jobs), JOB_WORDS), dtype=np.int64)
    if jobs:
        block[:, EXPERT] = [job.expert for job in jobs]
        block[:, SLOT] = -1
        block[:, DEADLINE] = [job.deadline for job in jobs]
        block[:, CONFIDENCE] = np.array([job.confidence for job in jobs]).view(np.int64)
    return block


def unpack_jobs(block: Jobs) -> list[FetchJob]:
    """The same, back."""
    confidences = np.ascontiguousarray(block[:, CONFIDENCE]).view(np.float64)
    return [
        FetchJob(*job)
        for job in zip(block[:, EXPERT].tolist(), block[:, DEADLINE].tolist(), confidences.tolist(), strict=True)
    ]


class ControlRegion:
    """The region in `memory`: any writable buffer of `nbytes(...)` bytes, by default one of its own."""

    def __init__(self, jobs: int, completions: int, memory: memoryview | None = None) -> None:
        """Room for `jobs` jobs and `completions` completions at once."""
        if jobs < 1 or completions < 1:
            raise ValueError(
                f"a control region needs room for at least one job and one completion, got {jobs}, {completions}"
            )
        self.jobs, self.completions = jobs, completions
        raw = memoryview(bytearray(self.nbytes(jobs, completions))) if memory is None else memory
        if raw.nbytes < self.nbytes(jobs, completions):
            raise ValueError(f"the region needs {self.nbytes(jobs, completions)} bytes, got {raw.nbytes}")
        self.words = raw.cast("B").cast("q")
        self._ring = np.frombuffer(raw.cast("B"), dtype=np.int64)[HEAD : HEAD + jobs * JOB_WORDS].reshape(
            jobs, JOB_WORDS
        )
        self._done_at = HEAD + jobs * JOB_WORDS

    @staticmethod
    def nbytes(jobs: int, completions: int) -> int:
        """Bytes of a region."""
        return 8 * (HEAD + jobs * JOB_WORDS + completions * DONE_WORDS)

    # -- the side that computes ---------------------------------------------------------------------------------

    def set_position(self, position: int) -> None:
        """The layer at `position` is at work."""
        self.words[POSITION] = position

    def set_pause(self, paused: bool) -> None:
        """On-demand loads have the link, or no longer have it."""
        self.words[PAUSE] = int(paused)

    def post(self, jobs: Jobs) -> int:
        """The jobs of a new forecast, most urgent first; earlier jobs are void. How many had room. The column of epochs is
        filled in here."""
        words, size = self.words, self.jobs
        epoch = words[EPOCH] + 1
        words[EPOCH] = epoch
        end = words[JOBS_END]
        count = min(len(jobs), size - (end - words[JOBS_TAKEN]))
        first = end % size
        split = min(count, size - first)
        jobs[:count, JOB_EPOCH] = epoch
        self._ring[first : first + split] = jobs[:split]
        self._ring[: count - split] = jobs[split:count]
        words[JOBS_END] = end + count
        return count

    def completed(self) -> Iterator[tuple[int, int]]:
        """(tag, status) of the transfers that ended since the last time."""
        words = self.words
        taken, end = words[DONE_TAKEN], words[DONE_END]
        while taken < end:
            at = self._done_at + taken % self.completions * DONE_WORDS
            entry = words[at], words[at + 1]
            taken += 1
            words[DONE_TAKEN] = taken
            yield entry

    def stop(self) -> None:
        """The worker is to end."""
        self.words[STOP] = 1

    # -- the worker ---------------------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """Of the layer at work."""
        return self.words[POSITION]

    @property
    def paused(self) -> bool:
        """Whether on-demand loads have the link."""
        return self.words[PAUSE] != 0

    @property
    def epoch(self) -> int:
        """Number of the latest forecast."""
        return self.words[EPOCH]

    @property
    def stopped(self) -> bool:
        """Whether the worker is to end."""
        return self.words[STOP] != 0

    def beat(self) -> None:
        """The worker is alive."""
        self.words[ALIVE] += 1

    def take_jobs(self) -> tuple[int, Jobs]:
        """The latest forecast's number, and those of its jobs that were written since the last time (a copy); void ones are
        passed over."""
        words, size = self.words, self.jobs
        taken, end = words[JOBS_TAKEN], words[JOBS_END]
        epoch = words[EPOCH]  # after the end: what is below the end is not newer than this
        if taken == end:
            return epoch, NO_JOBS
        places = np.arange(taken, end) % size
        found = self._ring[places]
        words[JOBS_TAKEN] = end
        fresh = found[:, JOB_EPOCH] == epoch
        return epoch, found if fresh.all() else found[fresh]

    def complete(self, tag: int, status: int) -> None:
        """The transfer `tag` is over: nothing writes to its slot any more."""
        words = self.words
        end = words[DONE_END]
        assert end - words[DONE_TAKEN] < self.completions, "more completions than slots"
        at = self._done_at + end % self.completions * DONE_WORDS
        words[at], words[at + 1] = tag, status
        words[DONE_END] = end + 1
