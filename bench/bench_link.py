"""Rate of the link at record sizes and queue depths, beside plain O_DIRECT reads of the same sizes by the same threads.

    python bench/bench_link.py --folder DIR [--file FILE] [--sizes 9MiB,1MiB,64KiB] [--depths 1,2,4,8,16] [--json-only]

All settings take turns, round by round, so that whatever else happens on the machine happens to all of them; figures are medians over
the rounds. The last line of stdout is one JSON object. Without --file, a file of --file-size is written to --folder and deleted.
"""

import argparse
import ctypes
import json
import mmap
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from seqmoe.profiles.knobs import Knobs
from seqmoe.profiles.sizes import format_bytes, parse_bytes
from seqmoe.profiles.spec import LinkSpec
from seqmoe.runtime.extents import round_up
from seqmoe.runtime.link import Link, Request, open_link
from seqmoe.runtime.pool import Pool

TRIAL_BYTES = (
    36 << 20
)  # a trial reads about this much, in at most 16 loads: short enough that most are left undisturbed


class Plain:
    """The ceiling: threads that do nothing but O_DIRECT preadv of whole records into memory of the same kind.

    No more of them than the records that the link is asked for together, but they never wait for each other.
    """

    def __init__(self, path: Path, pool: Pool, threads: int) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self.pool, self.threads = pool, threads
        self.others = ThreadPoolExecutor(max(1, threads - 1))  # kept: starting threads would count against the ceiling

    def __call__(self, requests: list[Request]) -> None:
        def part(mine: list[Request]) -> None:
            for request in mine:
                view = (ctypes.c_char * request.length).from_address(request.address)
                assert os.preadv(self.fd, [view], request.offset) == request.length

        rest = [self.others.submit(part, requests[n :: self.threads]) for n in range(1, self.threads)]
        part(requests[:: self.threads])
        for future in rest:
            future.result()

    def close(self) -> None:
        self.others.shutdown()
        os.close(self.fd)


class Loads:
    """The link, `at_once` records to a ticket (a layer's misses), one ticket after the other."""

    def __init__(self, link: Link, at_once: int) -> None:
        self.link, self.at_once = link, at_once

    def __call__(self, requests: list[Request]) -> None:
        for begin in range(0, len(requests), self.at_once):
            self.link.read(requests[begin : begin + self.at_once])


def write_file(path: Path, nbytes: int) -> None:
    """Random bytes: some storage compresses."""
    rng = np.random.default_rng(0)
    with open(path, "wb") as file:
        file.writelines(rng.bytes(8 << 20) for _ in range(0, nbytes, 8 << 20))
        file.flush()
        os.fsync(file.fileno())


def compare(path: Path, record_bytes: int, args: argparse.Namespace) -> dict[str, object]:
    """One record size: every reader's median rate in bytes/s, and the link's best against the best plain reader."""
    length = round_up(record_bytes)
    count = min(max(1, TRIAL_BYTES // length // args.at_once), 16) * args.at_once
    pool = Pool(count, length)
    plains = {n: Plain(path, pool, n) for n in sorted({1, min(args.read_threads, args.at_once)})}
    readers: dict[str, Callable[[list[Request]], None]] = {f"plain, {n} threads": plain for n, plain in plains.items()}
    links = {
        depth: open_link(
            [path],
            LinkSpec(),
            Knobs(queue_depth=depth, read_threads=args.read_threads, read_chunk_bytes=args.chunk_bytes),
        )
        for depth in args.depths
    }
    readers |= {f"link, depth {depth}": Loads(link, args.at_once) for depth, link in links.items()}
    rates: dict[str, list[float]] = {name: [] for name in readers}
    rng = np.random.default_rng(1)
    blocks = (path.stat().st_size - length) // mmap.PAGESIZE
    for round_number in range(args.rounds + 1):
        for name in rng.permutation(list(readers)):
            offsets = rng.integers(blocks, size=count) * mmap.PAGESIZE
            requests = [Request(0, int(offset), length, pool.slot_address(slot)) for slot, offset in enumerate(offsets)]
            begin = time.perf_counter()
            readers[name](requests)
            if round_number:  # the first takes the memory
                rates[name].append(count * length / (time.perf_counter() - begin))
    for link in links.values():
        link.close()
    for plain in plains.values():
        plain.close()
    pool.close()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ceilings = {name: rate for name, rate in medians.items() if name.startswith("plain")}
    ceiling = max(ceilings, key=lambda name: ceilings[name])
    # Medians of pairs from the same round: what disturbs one round disturbs both of its readers.
    shares = {
        name: statistics.median(a / b for a, b in zip(rates[name], rates[ceiling], strict=True))
        for name in rates
        if name not in ceilings
    }
    return {
        "record_bytes": record_bytes,
        "records_at_once": args.at_once,
        "bytes_per_s": medians,
        "ceiling": ceiling,
        "share_of_ceiling": shares,
        "link": next(iter(links.values())).describe(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=Path.cwd(), help="on the disk to measure; a file is written there"
    )
    parser.add_argument("--file", type=Path, help="read this file instead of writing one")
    parser.add_argument("--file-size", type=parse_bytes, default=1 << 30)
    parser.add_argument(
        "--sizes", type=lambda text: [parse_bytes(part) for part in text.split(",")], default="9MiB,1MiB,64KiB"
    )
    parser.add_argument("--depths", type=lambda text: [int(part) for part in text.split(",")], default="1,2,4,8,16")
    parser.add_argument("--read-threads", type=int, default=Knobs().read_threads)
    parser.add_argument("--chunk-bytes", type=parse_bytes, default=Knobs().read_chunk_bytes)
    parser.add_argument("--at-once", type=int, default=4, help="records that are missed together")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json-only", action="store_true")
    args = parser.parse_args()
    path = args.file or args.folder / f"bench-link-{os.getpid()}.bin"
    results = []
    try:
        if args.file is None:
            write_file(path, args.file_size)
        for size in args.sizes:
            result = compare(path, size, args)
            results.append(result)
            if not args.json_only:
                show(result)
    finally:
        if args.file is None:
            path.unlink(missing_ok=True)
    print(json.dumps({"bench": "link", "results": results}))


def show(result: dict[str, object]) -> None:
    rates, shares = result["bytes_per_s"], result["share_of_ceiling"]
    assert isinstance(rates, dict) and isinstance(shares, dict) and isinstance(result["record_bytes"], int)
    print(f"records of {format_bytes(result['record_bytes'])}, {result['records_at_once']} at once, {result['link']}")
    for name, rate in rates.items():
        share = f"  {shares[name]:6.1%} of {result['ceiling']}" if name in shares else ""
        print(f"  {name:18s} {rate / 1e9:6.2f} GB/s{share}", flush=True)


if __name__ == "__main__":
    main()
