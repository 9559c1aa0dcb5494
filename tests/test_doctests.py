"""The examples in docstrings give what they say. Modules that need an optional extra are left out where it is absent."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ["profiles", "predictors", "runtime", "autotune"]
NAMES = sorted(
    ".".join(("seqmoe", *path.relative_to(ROOT).with_suffix("").parts))
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if path.name not in ("__init__.py", "__main__.py")  # importing the latter would run it
)


@pytest.mark.parametrize("name", NAMES)
def test_doctests(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "seqmoe":
            raise  # our own module is missing: a bug
        pytest.skip(f"{error.name} is not installed")
    failed = doctest.testmod(module).failed
    assert failed == 0, f"{failed} examples of {name} failed, see the output above"
