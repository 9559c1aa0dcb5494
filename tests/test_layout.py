"""The direction of imports, the modules that load without torch, and that the wheel will have every folder."""

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# each may import itself and those before it
ORDER = ["profiles", "predictors", "runtime", "autotune"]
MODULES = sorted(path.relative_to(ROOT) for folder in ORDER for path in (ROOT / folder).rglob("*.py"))
# decisions are pure (design section 3): these load without torch, transformers or numba
TORCH_FREE = [
    "predictors/trace.py",
    "predictors/trace_file.py",
    "predictors/trace_import.py",
    "predictors/trace_stats.py",
    "predictors/trace_cli.py",
    "predictors/forecast.py",
    "predictors/protocol.py",
    "predictors/metrics.py",
    "predictors/calibration.py",
    "predictors/rivals.py",
    "predictors/history.py",
    "predictors/routers.py",
    "predictors/registry.py",
    "predictors/evaluate.py",
    "predictors/eval_cli.py",
    "predictors/fusion.py",
    "predictors/trace_forecasts.py",
    "runtime/residency.py",
    "runtime/eviction.py",
    "runtime/eviction_forecast.py",
    "runtime/schedule.py",
    "runtime/policy.py",
    "runtime/prefetch.py",
    "runtime/control.py",
    "runtime/replay_counts.py",
    "runtime/extents.py",
]


def dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(("seqmoe", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def imports(path: Path) -> Iterator[tuple[str, int, int]]:
    """(module, level, line) of every import statement, wherever in the file it stands."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, 0, node.lineno
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.level, node.lineno
            for name in node.names:
                yield f"{node.module}.{name.name}", node.level, node.lineno


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_run_one_way_and_are_absolute(path: Path) -> None:
    allowed = ORDER[: ORDER.index(path.parts[0]) + 1]
    for module, level, line in imports(path):
        assert level == 0, f"{path}:{line}: relative import"
        head, _, rest = module.partition(".")
        assert head not in ORDER, f"{path}:{line}: import seqmoe.{module}, not {module}"
        if head == "seqmoe" and rest:
            folder = rest.split(".")[0]
            assert folder in allowed, f"{path}:{line}: {path.parts[0]} imports {module}; it may import {allowed}"


def test_there_is_something_to_check() -> None:
    assert {path.parts[0] for path in MODULES} == set(ORDER)
    assert set(TORCH_FREE) <= {path.as_posix() for path in MODULES}


def test_pure_modules_load_without_torch() -> None:
    pure = [p for p in MODULES if p.parts[0] == "profiles" or p.as_posix() in TORCH_FREE]
    names = [dotted(path) for path in pure]
    code = (
        "import importlib, sys\n"
        "sys.path.insert(0, 'tests'); import conftest\n"  # as in a bare checkout
        f"for name in {names}:\n"
        "    importlib.import_module(name)\n"
        "    for heavy in ('torch', 'transformers', 'numba'):\n"
        "        assert heavy not in sys.modules, f'{name} loads {heavy}'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_packages_are_the_folders() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {dotted(path) for path in MODULES if path.name == "__init__.py"}
    assert sorted(setuptools["packages"]) == sorted(folders), "a folder is missing in the wheel, or is not there"
    assert setuptools["package-dir"] == {f"seqmoe.{folder}": folder for folder in ORDER}
    with_modules = {path.parent for path in MODULES}
    without = [str(folder) for folder in with_modules if not (ROOT / folder / "__init__.py").exists()]
    assert not without, f"no __init__.py in {without}"


def test_init_files_are_empty() -> None:
    full = [str(path) for path in MODULES if path.name == "__init__.py" and (ROOT / path).read_text().strip()]
    assert not full, f"these import something that their folder's modules then all pay for: {full}"


@pytest.mark.parametrize("folder", ORDER)
def test_type_checkers_see_the_folder(folder: str) -> None:
    assert (ROOT / folder / "py.typed").exists()
    assert os.readlink(ROOT / ".typing" / "seqmoe" / folder) == f"../../{folder}"
