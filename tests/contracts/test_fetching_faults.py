"""What goes wrong while the engine fetches ahead: tokens are those of `full` all the same, somebody says once what is wrong,
and the next request finds everything in order. See test_faults.py for what goes wrong without prefetch."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.families import make_checkpoint
from support.toy_traces import random_trace

from seqmoe.predictors.rivals import LastStep
from seqmoe.profiles.errors import LinkError, UsageError
from seqmoe.profiles.knobs import Knobs
from seqmoe.runtime import fetching as fetching_module
from seqmoe.runtime import runner as runner_module
from seqmoe.runtime.engine import Engine
from seqmoe.runtime.residency import Fetch

PROMPT = [5, 17, 33, 2, 71]
NEW_TOKENS = 24
LAYERS, EXPERTS, TOP_K = 2, 16, 4  # of the checkpoint
MODE = "seqmoe-no-restraint"  # self-restraint would end prefetch as soon as it does no good
FAST_LINK, SLOW_LINK = "throttled:100MB/s,20us", "throttled:1MB/s,20us"  # of records of some 10 KB
GARBAGE = 0x7F  # makes large numbers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_moe", "hub", tmp_path_factory.mktemp("faults") / "moe", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    with Engine.open(folder, mode="full", context=64) as engine:
        return engine.generate([PROMPT], NEW_TOKENS, ignore_eos=True).token_ids[0]


@pytest.fixture(autouse=True)
def quick(one_thread: None) -> None:
    pass


class Predictor(LastStep):
    """Says that what was used is used again; or whatever `fault` makes of it."""

    fault: Callable[[NDArray[np.float32]], Any] | None = None
    faulty_observe = faulty_start = False
    calls = 0

    def start(self, batch: int) -> None:
        if self.faulty_start:
            raise RuntimeError("cannot start")
        super().start(batch)

    def observe(self, activations: NDArray[np.float32], tokens: Any = None) -> None:
        if self.faulty_observe:
            raise RuntimeError("cannot observe")
        super().observe(activations, tokens)

    def forecast(self, horizon: int, tokens: Any = None) -> NDArray[np.float32]:
        self.calls += 1
        scores = super().forecast(horizon, tokens)
        return scores if self.fault is None else self.fault(scores)


def open_engine(folder: Path, **options: Any) -> Engine:
    """With the predictor above."""
    trace = random_trace([40], LAYERS, EXPERTS, TOP_K)
    usual = {"mode": MODE, "slots": 14, "context": 64, "link": FAST_LINK, "knobs": Knobs(compute_threads=1)}
    known = {"predictor": Predictor().fit(trace), "popularity": trace.popularity()}
    return Engine.open(folder, **{**usual, **known, **options})


class Stream:
    """A streamer that keeps the new tokens and calls `act` once, after `after` of them."""

    def __init__(self, act: Callable[[], Any], after: int = 4) -> None:
        self.tokens: list[int] = []
        self._act, self._after, self._seen_prompt = act, after, False

    def put(self, value: torch.Tensor) -> None:
        if not self._seen_prompt:
            self._seen_prompt = True
            return
        self.tokens += value.flatten().tolist()
        if len(self.tokens) == self._after:
            self._act()

    def end(self) -> None:
        pass


def answer(engine: Engine, act: Callable[[], Any] = lambda: None) -> list[int]:
    """The new tokens; `act` is called after four of them. Then the tables are in order."""
    tokens = engine.generate([PROMPT], NEW_TOKENS, ignore_eos=True, streamer=Stream(act)).token_ids[0]
    check_tables(engine)
    return tokens


def check_tables(engine: Engine) -> None:
    assert engine.residency is not None and engine.fetching is not None
    with engine.fetching.lock:
        engine.residency.check_integrity()


def prefetched(engine: Engine) -> int:
    assert engine.residency is not None
    return engine.residency.counts.prefetched


def one_more_answer(engine: Engine, expected: list[int]) -> None:
    """A request in which all is well again: experts are fetched ahead."""
    before = prefetched(engine)
    assert answer(engine) == expected
    assert prefetched(engine) > before, "prefetch stayed off"


def warnings(caplog: pytest.LogCaptureFixture, *words: str) -> list[str]:
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [text for text in said if all(word in text for word in words)]


# -- reads ----------------------------------------------------------------------------------------------------------


class Broken:
    """A read that fails, or hangs until it is released and fails then; its slot holds garbage."""

    def __init__(self, engine: Engine, fetches: list[Fetch], released: threading.Event) -> None:
        self.engine, self.fetches, self.released = engine, fetches, released
        self._spoil()

    def _spoil(self) -> None:
        for fetch in self.fetches:
            self.engine.store.pool.memory(fetch.slot)[:] = bytes([GARBAGE]) * self.engine.store.slot_bytes

    def done(self) -> bool:
        if self.released.is_set() and self.fetches:
            self._spoil()  # the last moment at which it may write
            self.fetches = []
        return self.released.is_set()

    def wait(self, timeout_s: float | None = None, *, exact: bool = True) -> None:
        if not self.released.wait(timeout_s):
            raise LinkError(f"no answer within {timeout_s} s")
        self.done()
        raise LinkError("the read failed")


def break_reads(
    engine: Engine, released: threading.Event, *, background: bool, every: int = 1, most: int = 1 << 30
) -> list[Broken]:
    """From now on every so-manieth read of that kind is broken."""
    load, broken, count = engine.store.load, [], 0

    def sometimes(fetches: list[Fetch], **options: Any) -> Any:
        nonlocal count
        if options.get("background", False) == background:
            count += 1
            if count % every == 0 and len(broken) < most:
                broken.append(Broken(engine, list(fetches), released))
                return broken[-1]
        return load(fetches, **options)

    engine.store.load = sometimes  # type: ignore[method-assign, assignment]
    return broken


@pytest.mark.parametrize("every", [1, 3])
def test_fetches_fail(folder: Path, expected: list[int], every: int) -> None:
    """Their experts are loaded when they are needed."""
    always = threading.Event()
    always.set()
    with open_engine(folder) as engine:
        assert answer(engine) == expected
        broken = break_reads(engine, always, background=True, every=every)
        assert answer(engine) == expected
        assert answer(engine) == expected
        assert len(broken) > 5
        assert engine.residency is not None and engine.residency.counts.failed >= 5


def test_fetches_cannot_even_begin(folder: Path, expected: list[int]) -> None:
    with open_engine(folder) as engine:
        load = engine.store.load

        def refuse(fetches: list[Fetch], **options: Any) -> Any:
            if options.get("background"):
                raise LinkError("the device is gone")
            return load(fetches, **options)

        engine.store.load = refuse  # type: ignore[method-assign, assignment]
        assert answer(engine) == expected
        engine.store.load = load  # type: ignore[method-assign]
        one_more_answer(engine, expected)


def test_a_fetch_hangs(folder: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its expert is not awaited for ever, its slot is left alone, and when it ends at last prefetch goes on."""
    monkeypatch.setattr(fetching_module, "LATE_S", 0.02)
    released = threading.Event()
    with open_engine(folder) as engine:
        assert answer(engine) == expected
        broken = break_reads(engine, released, background=True, most=1)
        started = time.perf_counter()
        for _ in range(3):
            assert answer(engine) == expected
        assert time.perf_counter() - started < 20, "somebody waited for the read that hangs"
        assert len(broken) == 1 and engine.residency is not None and len(engine.residency.in_flight) == 1
        released.set()
        assert engine.fetching is not None and engine.fetching.worker.quiesce(5.0)
        one_more_answer(engine, expected)
        assert broken[0].fetches == [] and broken[0].done()


@pytest.mark.parametrize("slots", [4, 5, 16, 17])
def test_a_fetch_hangs_in_a_small_pool(
    folder: Path, expected: list[int], slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left is enough for a layer."""
    monkeypatch.setattr(fetching_module, "LATE_S", 0.02)
    released = threading.Event()
    with open_engine(folder, slots=slots) as engine:
        break_reads(engine, released, background=True, most=1)
        for _ in range(2):
            assert answer(engine) == expected
        released.set()


@pytest.fixture
def weights(folder: Path) -> Iterator[list[Path]]:
    """The checkpoint's files; whatever a test did to them is undone."""
    paths = sorted(folder.glob("*.safetensors"))
    contents = [path.read_bytes() for path in paths]
    yield paths
    for path, content in zip(paths, contents, strict=True):
        path.unlink(missing_ok=True)
        path.write_bytes(content)


@pytest.mark.parametrize("link", ["disk", "buffered", FAST_LINK])
def test_file_cut_while_fetching(folder: Path, weights: list[Path], expected: list[int], link: str) -> None:
    """Fetches and loads on demand fail alike; the request ends with one error, and after it all is as before."""
    whole = [path.read_bytes() for path in weights]

    def cut() -> None:
        for path in weights:
            os.truncate(path, 4096)

    with open_engine(folder, link=link) as engine:
        stream = Stream(cut)
        with pytest.raises(LinkError, match=r"expert \(layer \d, index \d+\) could not be loaded: .*but the file ends"):
            engine.generate([PROMPT], NEW_TOKENS, ignore_eos=True, streamer=stream)
        assert stream.tokens == expected[: len(stream.tokens)]
        check_tables(engine)
        with pytest.raises(LinkError):
            answer(engine)
        check_tables(engine)
        for path, content in zip(weights, whole, strict=True):
            path.write_bytes(content)
        one_more_answer(engine, expected)


def test_a_load_on_demand_hangs(folder: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The request ends with an error; the next one is right."""
    monkeypatch.setattr(runner_module, "READ_TIMEOUT_S", 0.1)
    released = threading.Event()
    with open_engine(folder) as engine:
        assert answer(engine) == expected
        load = engine.store.load
        break_reads(engine, released, background=False, most=1)
        stream = Stream(lambda: None)
        with pytest.raises(LinkError, match="no answer"):
            engine.generate([PROMPT], NEW_TOKENS, ignore_eos=True, streamer=stream)
        assert stream.tokens == expected[: len(stream.tokens)]
        check_tables(engine)
        engine.store.load = load  # type: ignore[method-assign]
        one_more_answer(engine, expected)


def test_a_link_that_becomes_slow(folder: Path, expected: list[int]) -> None:
    """See also test_fetching_equal.py, where the clock is ours."""
    with open_engine(folder) as engine:
        link = engine.store.link

        def slow() -> None:
            assert link.bytes_per_s is not None
            link.bytes_per_s /= 10

        assert answer(engine, slow) == expected
        one_more_answer(engine, expected)


# -- the worker -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["next", "reach", "offer_block"])
def test_the_worker_dies(folder: Path, expected: list[int], place: str, caplog: pytest.LogCaptureFixture) -> None:
    """One warning; tokens go on; the next request has a worker again."""
    with open_engine(folder) as engine:
        assert engine.fetching is not None
        prefetcher = engine.fetching.prefetcher

        def die(*_: Any, **__: Any) -> None:
            raise ZeroDivisionError("of old age")

        def later() -> None:
            setattr(prefetcher, place, die)

        assert answer(engine, later) == expected
        assert not engine.fetching.worker.alive
        assert len(warnings(caplog, "the fetch worker died", "of old age")) == 1
        delattr(prefetcher, place)
        one_more_answer(engine, expected)
        assert len(warnings(caplog, "died")) == 1 and engine.fetching.worker.alive


def test_the_worker_dies_in_every_request(
    folder: Path, expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with open_engine(folder) as engine:
        assert engine.fetching is not None
        engine.fetching.prefetcher.next = lambda: 1 // 0  # type: ignore[method-assign, assignment, return-value]
        for _ in range(3):
            assert answer(engine) == expected
        assert len(warnings(caplog, "the fetch worker died")) == 1


# -- forecasts ------------------------------------------------------------------------------------------------------


def some_nan(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    scores = scores.copy()
    scores[..., -1] = np.nan
    return scores


def fail(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    raise RuntimeError("the predictor is out of order")


FAULTS: dict[str, Callable[[NDArray[np.float32]], Any]] = {
    "raises": fail,
    "all nan": lambda scores: np.full_like(scores, np.nan),
    "some nan": some_nan,
    "infinite": lambda scores: scores * np.inf,
    "negative": lambda scores: scores - 1.0,
    "a list": lambda scores: scores.tolist(),
    "nothing": lambda scores: None,
    "of fewer experts": lambda scores: scores[..., 1:],
    "of fewer layers": lambda scores: scores[:, :, 1:],
    "of no step": lambda scores: scores[:, :0],
    "of text": lambda scores: scores.astype(str),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_forecast_is_nonsense(
    folder: Path, expected: list[int], fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning; prefetch is off for the request; the next request tries again."""
    with open_engine(folder, mode="seqmoe-no-restraint") as engine:
        assert engine.fetching is not None
        predictor = engine.fetching.forecaster.predictor  # type: ignore[union-attr]
        assert isinstance(predictor, Predictor)
        before: list[int] = []

        def later() -> None:
            predictor.fault = FAULTS[fault]

        def count() -> None:
            before.append(prefetched(engine))

        assert answer(engine, later) == expected
        calls = predictor.calls
        said = warnings(caplog, "a forecast cannot be used")
        assert 1 <= len(said) <= 2 and "prefetch is off for this request" in said[-1], said
        assert answer(engine, count) == expected
        assert predictor.calls - calls <= 3, "it was asked on and on"
        assert prefetched(engine) == before[0], "there was something to fetch"
        assert len(warnings(caplog, "a forecast cannot be used")) == len(said), "said again"
        predictor.fault = None
        one_more_answer(engine, expected)


@pytest.mark.parametrize("place", ["faulty_start", "faulty_observe"])
def test_a_predictor_takes_nothing_in(
    folder: Path, expected: list[int], place: str, caplog: pytest.LogCaptureFixture
) -> None:
    with open_engine(folder) as engine:
        assert engine.fetching is not None
        predictor = engine.fetching.forecaster.predictor  # type: ignore[union-attr]
        setattr(predictor, place, True)
        assert answer(engine) == expected
        assert warnings(caplog, "a forecast cannot be used", "RuntimeError: cannot")
        setattr(predictor, place, False)
        one_more_answer(engine, expected)


class LayerScores:
    """What SpecPrefetch's adapters would say."""

    name, depth, nbytes = "given", 1, 0

    def __init__(self) -> None:
        self.fault: Callable[[NDArray[np.float32]], Any] | None = None
        self.rng = np.random.default_rng(0)

    def refine(self, layer: int, router_input: NDArray[np.floating]) -> NDArray[np.float32]:
        scores = self.rng.random((1, EXPERTS), dtype=np.float32)
        return scores if self.fault is None else self.fault(scores)


@pytest.mark.parametrize("fault", ["raises", "some nan", "negative", "of fewer experts", "nothing"])
def test_adapters_say_nonsense(folder: Path, expected: list[int], fault: str, caplog: pytest.LogCaptureFixture) -> None:
    adapters = LayerScores()
    with open_engine(folder, mode="specprefetch", predictor=adapters) as engine:
        one_more_answer(engine, expected)
        adapters.fault = FAULTS[fault]
        assert answer(engine) == expected
        assert warnings(caplog, "a forecast cannot be used", "prefetch is off for this request")
        adapters.fault = None
        one_more_answer(engine, expected)


# -- interruptions --------------------------------------------------------------------------------------------------


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, and so does the alarm clock."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGALRM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("link", [FAST_LINK, SLOW_LINK])
def test_cancelled_with_a_fetch_under_way(folder: Path, expected: list[int], link: str, interruptible: None) -> None:
    with open_engine(folder, link=link) as engine:
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                answer(engine, interrupt)
            assert answer(engine) == expected
        one_more_answer(engine, expected)


@pytest.mark.parametrize("mode", [MODE, "seqmoe-early-binding", "seqmoe", "promoe"])
def test_interrupted_at_any_moment(folder: Path, expected: list[int], mode: str, interruptible: None) -> None:
    """KeyboardInterrupt wherever the interpreter happens to be: in a forecast, between two tables' updates, in a wait."""
    rng = np.random.default_rng(0)
    interrupted = 0
    with open_engine(folder, mode=mode) as engine:
        answer(engine)
        started = time.perf_counter()
        answer(engine)
        usual = time.perf_counter() - started
        for _ in range(25):
            signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(1e-4, usual)))
            try:
                engine.generate([PROMPT], NEW_TOKENS, ignore_eos=True)
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert answer(engine) == expected
        assert engine.fetching is not None and engine.fetching.worker.alive
        assert not [text for text in engine.fetching.notices if "died" in text], engine.fetching.notices
    assert interrupted > 5


# -- several at once, and the end -----------------------------------------------------------------------------------


def test_two_requests_at_once(folder: Path, expected: list[int]) -> None:
    errors: list[BaseException] = []

    def second() -> None:
        try:
            engine.generate([PROMPT], 2)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    def from_a_thread() -> None:
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(30)

    with open_engine(folder) as engine:
        for act in (second, from_a_thread):
            assert answer(engine, act) == expected
        assert [str(error) for error in errors] == ["the engine is at work on another request: one at a time"] * 2
        one_more_answer(engine, expected)


def test_closed_with_a_fetch_under_way(folder: Path, expected: list[int]) -> None:
    """Nobody waits for long, and nothing writes to memory that is gone."""
    engine = open_engine(folder, link="throttled:1KB/s,20us")
    assert engine.fetching is not None
    worker = engine.fetching.worker
    link = engine.store.link
    link.bytes_per_s = 1e8
    assert answer(engine) == expected

    def slow() -> None:
        link.bytes_per_s = 1e5

    with pytest.raises(KeyboardInterrupt):
        answer(engine, lambda: (slow(), time.sleep(0.2), interrupt()))
    engine._busy = False
    started = time.perf_counter()
    engine.close()
    assert time.perf_counter() - started < 12
    with pytest.raises(UsageError, match="the engine is closed"):
        engine.generate([PROMPT], 2)
    limit = time.perf_counter() + 5
    while worker.alive and time.perf_counter() < limit:
        time.sleep(0.05)


def test_an_engine_at_work_is_not_closed(folder: Path, expected: list[int]) -> None:
    errors: list[UsageError] = []

    def close() -> None:
        try:
            engine.close()
        except UsageError as error:
            errors.append(error)

    with open_engine(folder) as engine:
        assert answer(engine, close) == expected
    assert [str(error) for error in errors] == ["the engine is at work: it can be closed when the request is over"]
