"""Lets the tests run from a bare checkout: maps `seqmoe` onto the repository's root when the package is not installed."""

import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

if importlib.util.find_spec("seqmoe") is None:
    seqmoe = types.ModuleType("seqmoe")
    seqmoe.__path__ = [str(Path(__file__).parent.parent)]
    sys.modules["seqmoe"] = seqmoe


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny operations on two threads wait for each other, on a busy machine for milliseconds."""
    import torch  # most tests do without

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
