"""How fast records come over a link: random reads of a record's size at the very settings that will be used."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from seqmoe.profiles.errors import LinkError
from seqmoe.profiles.knobs import Knobs
from seqmoe.profiles.spec import LinkSpec
from seqmoe.runtime.extents import ALIGN, round_up
from seqmoe.runtime.link import Link, Request, open_link
from seqmoe.runtime.pool import Pool


@dataclass(frozen=True)
class LinkProbe:
    """Times of `samples` loads of `records_at_once` records of `record_bytes` each, and the rate that the median gives."""

    link: str  # what it was, in words
    record_bytes: int
    records_at_once: int
    samples: int
    p10_s: float
    p50_s: float
    p90_s: float

    @property
    def bytes_per_s(self) -> float:
        return self.record_bytes * self.records_at_once / self.p50_s


def probe_link(
    files: Sequence[Path],
    record_bytes: int,
    spec: LinkSpec | None = None,
    knobs: Knobs | None = None,
    *,
    records_at_once: int = 1,
    samples: int = 64,
    seconds: float = 2.0,
    seed: int = 0,
) -> LinkProbe:
    """Loads random records from `files`, as misses would be, until there are `samples` or `seconds` have passed (at least 5).

    The memory is that of a pool of `records_at_once` slots. Raises LinkError if no file is as large as a record.
    """
    with open_link(files, spec or LinkSpec(), knobs or Knobs()) as link:
        pool = Pool(records_at_once, round_up(record_bytes))
        try:
            times = time_loads(link, pool, record_bytes, samples=samples, seconds=seconds, seed=seed)
        finally:
            if link.close():  # else a hanging read may still write there
                pool.close()
        p10, p50, p90 = (float(np.percentile(times, q)) for q in (10, 50, 90))
        return LinkProbe(link.describe(), record_bytes, records_at_once, len(times), p10, p50, p90)


def time_loads(link: Link, pool: Pool, record_bytes: int, *, samples: int, seconds: float, seed: int) -> list[float]:
    """Seconds that each load of `pool.num_slots` random records took; the first, which takes the memory, does not count."""
    rng = np.random.default_rng(seed)
    length = round_up(record_bytes)
    blocks = [max(0, (source.nbytes - length) // ALIGN + 1) for source in link.sources]
    if not sum(blocks):
        raise LinkError(f"no file is as large as a record of {record_bytes} bytes: {', '.join(s.name for s in link.sources)}")
    bounds = np.cumsum(blocks)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) <= samples and (len(times) <= 5 or time.perf_counter() < end):
        requests = []
        for slot in range(pool.num_slots):
            block = int(rng.integers(bounds[-1]))
            source = int(np.searchsorted(bounds, block, side="right"))
            offset = (block - int(bounds[source]) + blocks[source]) * ALIGN
            requests.append(Request(source, offset, length, pool.slot_address(slot)))
        begin = time.perf_counter()
        link.read(requests)
        times.append(time.perf_counter() - begin)
    return times[1:]
