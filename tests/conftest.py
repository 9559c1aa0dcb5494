"""Lets the tests run from a bare checkout: maps `seqmoe` onto the repository's root when the package is not installed."""

import importlib.util
import sys
import types
from pathlib import Path

if importlib.util.find_spec("seqmoe") is None:
    seqmoe = types.ModuleType("seqmoe")
    seqmoe.__path__ = [str(Path(__file__).parent.parent)]
    sys.modules["seqmoe"] = seqmoe
