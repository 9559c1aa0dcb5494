import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from seqmoe.profiles.errors import BudgetError, CheckpointError, LinkError
from seqmoe.runtime.extents import RecordPlan, plan_reads
from seqmoe.runtime.link import Link
from seqmoe.runtime.pool import Pool
from seqmoe.runtime.residency import Fetch
from seqmoe.runtime.store import Store

LAYERS, EXPERTS, VIEWS = 2, 5, (5000, 5000, 12_000)
SLOTS = 4

Make = Callable[..., Store]


class Model:
    """Two files; view 2 of each expert lies apart, in the other one. The very last view ends with its file."""

    def __init__(self, folder: Path) -> None:
        rng = np.random.default_rng(3)
        records = LAYERS * EXPERTS
        self.files = [folder / "model-1.bin", folder / "model-2.bin"]
        self.data = [rng.bytes(1111 + records * 10_000 + 77), rng.bytes(333 + records * 12_000)]
        for path, data in zip(self.files, self.data, strict=True):
            path.write_bytes(data)
        self.sources = np.zeros((LAYERS, EXPERTS, 3, 2), dtype=np.int64)
        for flat in range(records):
            at = flat // EXPERTS, flat % EXPERTS
            self.sources[at] = [(0, 1111 + flat * 10_000), (0, 1111 + flat * 10_000 + 5000), (1, 333 + flat * 12_000)]
        self.plan: RecordPlan = plan_reads(VIEWS, self.sources, [len(data) for data in self.data])

    def view(self, flat: int, view: int) -> bytes:
        file, begin = self.sources[flat // EXPERTS, flat % EXPERTS, view]
        return self.data[file][begin : begin + VIEWS[view]]


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path)


@pytest.fixture
def make(model: Model) -> Iterator[Make]:
    stores: list[Store] = []

    def make(slots: int = SLOTS, host_copy: bool = False, **link: object) -> Store:
        store = Store(model.plan, Pool(slots, model.plan.slot_bytes), Link(model.files, **link), host_copy=host_copy)  # type: ignore[arg-type]
        stores.append(store)
        return store

    yield make
    for store in stores:
        store.close()


def bytes_at(addresses: np.ndarray, view: int) -> bytes:
    return ctypes.string_at(int(addresses[view]), VIEWS[view])


def check(store: Store, model: Model, fetches: list[Fetch]) -> None:
    for fetch in fetches:
        addresses = store.view_addresses(fetch.expert, fetch.slot)
        assert addresses.dtype == np.int64 and addresses.shape == (3,)
        for view in range(3):
            assert bytes_at(addresses, view) == model.view(fetch.expert, view), (fetch, view)


LINKS = {
    "disk": {},
    "disk, small pieces, no aio": {"read_chunk_bytes": 4096, "queue_depth": 1},
    "buffered": {"kind": "buffered"},
    "throttled": {"kind": "throttled", "bytes_per_s": 1e9},
    "throttled from the host copy": {"kind": "throttled", "bytes_per_s": 1e9, "host_copy": True},
    "dma": {"kind": "dma", "bytes_per_s": 1e9},
}


@pytest.mark.parametrize("name", LINKS)
def test_every_expert_lands_in_any_slot(make: Make, model: Model, name: str) -> None:
    store = make(**LINKS[name])
    rng = np.random.default_rng(1)
    for _ in range(12):
        experts = rng.choice(LAYERS * EXPERTS, size=SLOTS, replace=False)
        fetches = [Fetch(int(flat), slot, -1, 0) for slot, flat in enumerate(experts)]
        store.load(fetches).wait()
        check(store, model, fetches)
    assert store.bytes_needed == 12 * SLOTS * sum(VIEWS)
    assert (store.num_views, store.record_bytes) == (3, sum(VIEWS))


@pytest.mark.parametrize("name", ["disk", "dma"])
def test_addresses_of_several_equal_those_of_each(make: Make, name: str) -> None:
    store = make(**LINKS[name])
    flats, slots = [7, 0, 9], [1, 3, 0]
    together = store.addresses(flats, slots)
    assert [row.tolist() for row in together] == [store.view_addresses(f, s).tolist() for f, s in zip(flats, slots, strict=True)]


@pytest.mark.parametrize("name", ["disk", "dma"])
def test_load_all(make: Make, model: Model, name: str) -> None:
    store = make(slots=LAYERS * EXPERTS, **LINKS[name])
    seen: list[tuple[int, int]] = []
    addresses = store.load_all(lambda done, total: seen.append((done, total)))
    for flat in range(LAYERS * EXPERTS):
        for view in range(3):
            assert bytes_at(addresses[flat // EXPERTS, flat % EXPERTS], view) == model.view(flat, view)
    if name == "disk":
        assert seen[-1] == (LAYERS * EXPERTS, LAYERS * EXPERTS)


def test_accounting_tells_needed_from_read(make: Make, model: Model) -> None:
    store = make()
    store.load([Fetch(3, 0, -1, 0), Fetch(9, 1, -1, 1)]).wait()
    assert store.bytes_needed == 2 * sum(VIEWS)
    assert store.bytes_read == model.plan.read_bytes[[3, 9]].sum() > store.bytes_needed


def test_dma_leaves_the_pool_alone_and_says_what_its_copy_takes(make: Make, model: Model) -> None:
    store = make(kind="dma", bytes_per_s=1e9)
    store.load([Fetch(0, 0, -1, 0)]).wait()
    assert store.pool.resident_bytes() == 0
    assert store.host_copy_bytes == LAYERS * EXPERTS * store.slot_bytes
    assert store.bytes_read == sum(VIEWS)  # charged without alignment, which memory has no need of


def test_errors_name_the_expert(make: Make, model: Model) -> None:
    store = make()
    os.truncate(model.files[1], 333 + 8 * 12_000)  # what (layer 1, index 3) and (layer 1, index 4) had there is gone
    store.load([Fetch(6, 0, -1, 0)]).wait()
    with pytest.raises(LinkError, match=r"expert \(layer 1, index 3\) could not be loaded: .*model-2.bin: wanted bytes .* file ends at"):
        store.load([Fetch(2, 1, -1, 0), Fetch(8, 2, -1, 0)]).wait()
    with pytest.raises(LinkError, match="changed while it was in use"):
        store.check_unchanged()
    fetches = [Fetch(1, 3, -1, 0)]
    store.load(fetches).wait()  # the store lives on
    check(store, model, fetches)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size_is_refused_at_open(make: Make, model: Model, change: int) -> None:
    size = len(model.data[0])
    os.truncate(model.files[0], size + change)
    with pytest.raises(CheckpointError, match=f"model-1.bin: the file has {size + change} bytes, its header says {size}"):
        make()


def test_host_copy_that_does_not_fit(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from seqmoe.profiles import machine

    facts = machine.memory_facts()
    small = type(facts)(**{**vars(facts), "ram_room_bytes": facts.rss_bytes + 1000})
    monkeypatch.setattr("seqmoe.runtime.store.memory_facts", lambda: small)
    with pytest.raises(BudgetError, match="a dma link keeps all 10 experts in memory: .* are free; use link disk"):
        make(kind="dma", bytes_per_s=1e9)


def test_close_twice(make: Make) -> None:
    store = make()
    store.load([Fetch(0, 0, -1, 0)])
    assert store.close()
    assert store.close()
    assert store.pool.resident_bytes() == 0
