"""What goes wrong while the engine is at work: the request ends with one error, no wrong token was streamed, and the same
engine answers the next request right."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.families import make_checkpoint

from seqmoe.profiles.errors import LinkError, SeqmoeError, UsageError
from seqmoe.profiles.knobs import Knobs
from seqmoe.runtime.engine import Engine

PROMPT = [5, 17, 33, 2, 71]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_moe", "hub", tmp_path_factory.mktemp("faults") / "moe", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    with Engine.open(folder, mode="full", context=64) as engine:
        return engine.generate([PROMPT], NEW_TOKENS, ignore_eos=True).token_ids[0]


@pytest.fixture
def weights(folder: Path) -> Iterator[list[Path]]:
    """The checkpoint's files; whatever a test did to them is undone."""
    paths = sorted(folder.glob("*.safetensors"))
    contents = [path.read_bytes() for path in paths]
    yield paths
    for path, content in zip(paths, contents, strict=True):
        path.unlink(missing_ok=True)
        path.write_bytes(content)


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


def answer(engine: Engine) -> list[int]:
    tokens = engine.generate([PROMPT], NEW_TOKENS, ignore_eos=True).token_ids[0]
    if engine.residency is not None:
        engine.residency.check_integrity()
    return tokens


@pytest.mark.parametrize("graph", [True, False], ids=["captured", "plain"])
@pytest.mark.parametrize("options", [{"mode": "lru"}, {"mode": "eager"}, {"mode": "lfu", "link": "buffered"}], ids=str)
def test_file_cut_while_decoding(
    folder: Path, weights: list[Path], expected: list[int], options: dict[str, Any], graph: bool
) -> None:
    whole = [path.read_bytes() for path in weights]

    def cut() -> None:
        for path in weights:
            os.truncate(path, 4096)

    with Engine.open(folder, slots=4, context=64, graph=graph, **options) as engine:
        stream = Stream(cut)
        with pytest.raises(LinkError, match=r"expert \(layer \d, index \d+\) could not be loaded: .*but the file ends"):
            engine.generate([PROMPT], NEW_TOKENS, ignore_eos=True, streamer=stream)
        assert 4 <= len(stream.tokens) < NEW_TOKENS
        assert stream.tokens == expected[: len(stream.tokens)]
        with pytest.raises(LinkError):  # in prefill, too
            answer(engine)
        for path, content in zip(weights, whole, strict=True):
            path.write_bytes(content)  # the same file, back again
        assert answer(engine) == expected


def test_file_removed_or_replaced_while_decoding_stays_what_it_was(
    folder: Path, weights: list[Path], expected: list[int]
) -> None:
    def replace() -> None:
        for path in weights:
            path.unlink()
            path.write_bytes(os.urandom(4096))

    with Engine.open(folder, mode="lru", slots=4, context=64) as engine:
        stream = Stream(replace)
        assert engine.generate([PROMPT], NEW_TOKENS, ignore_eos=True, streamer=stream).token_ids[0] == expected
        assert stream.tokens == expected


def test_interrupted_at_any_moment(folder: Path, expected: list[int], one_thread: None) -> None:
    """KeyboardInterrupt wherever the interpreter happens to be: in a load, in a kernel, between two tables' updates."""
    rng = np.random.default_rng(0)
    interrupted = 0
    with Engine.open(folder, mode="lru", slots=6, context=64, knobs=Knobs(compute_threads=1)) as engine:
        engine.generate([PROMPT], NEW_TOKENS, ignore_eos=True)
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            for _ in range(30):
                signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(1e-4, 0.03)))
                try:
                    engine.generate([PROMPT], NEW_TOKENS, ignore_eos=True)
                except KeyboardInterrupt:
                    interrupted += 1
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                assert answer(engine) == expected
        finally:
            signal.signal(signal.SIGALRM, before)
    assert interrupted > 5


def test_one_request_at_a_time(folder: Path, expected: list[int]) -> None:
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

    with Engine.open(folder, mode="lru", slots=4, context=64) as engine:
        for act in (second, from_a_thread):
            stream = Stream(act)
            assert engine.generate([PROMPT], NEW_TOKENS, ignore_eos=True, streamer=stream).token_ids[0] == expected
        assert [str(error) for error in errors] == ["the engine is at work on another request: one at a time"] * 2
        assert all(isinstance(error, UsageError) for error in errors)
        assert answer(engine) == expected


@pytest.mark.parametrize("mode", ["full", "lru"])
def test_closed_engine(folder: Path, mode: str) -> None:
    engine = Engine.open(folder, mode=mode, residency=None if mode == "full" else 0.5, context=64)
    engine.close()
    engine.close()
    with pytest.raises(UsageError, match="the engine is closed"):
        engine.generate([PROMPT], 2)
    with pytest.raises((SeqmoeError, RuntimeError, NotImplementedError, KeyError)):  # no crash: nobody reads freed memory
        engine.model(torch.tensor([PROMPT]))


@pytest.mark.parametrize("mode", ["full", "lru"])
def test_an_engine_at_work_is_not_closed(folder: Path, expected: list[int], mode: str) -> None:
    """What the request reads would be unmapped."""
    errors: list[SeqmoeError] = []

    def close() -> None:
        try:
            engine.close()
        except SeqmoeError as error:
            errors.append(error)

    with Engine.open(folder, mode=mode, context=64) as engine:
        assert engine.generate([PROMPT], NEW_TOKENS, ignore_eos=True, streamer=Stream(close)).token_ids[0] == expected
    assert [str(error) for error in errors] == ["the engine is at work: it can be closed when the request is over"]
