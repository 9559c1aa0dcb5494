"""The OpenMP library that torch has loaded, called by address, so that kernels and torch share one pool of threads.

A second library with threads of its own would have both spin for the same cores.
"""

import ctypes
import functools
import warnings
from dataclasses import dataclass

import torch

_LIBRARIES = ("libgomp", "libiomp5", "libomp")  # the last two speak GNU's interface as well


@dataclass(frozen=True)
class OpenMP:
    """Address of `GOMP_parallel`, 0 where there is no such library."""

    parallel: int
    path: str

    @property
    def available(self) -> bool:
        return self.parallel != 0


@functools.cache
def find_openmp() -> OpenMP:
    """Torch's OpenMP; without one a warning says once that experts are computed on one thread."""
    for path in _loaded():
        library = ctypes.CDLL(path)
        try:
            parallel = library.GOMP_parallel
        except AttributeError:
            continue
        return OpenMP(ctypes.cast(parallel, ctypes.c_void_p).value or 0, path)
    warnings.warn("torch has loaded no OpenMP library: experts are computed on one thread", stacklevel=2)
    return OpenMP(0, "")


def _loaded() -> list[str]:
    """Paths of the OpenMP libraries in this process, in the order of `_LIBRARIES`."""
    torch.get_num_threads()  # importing torch has loaded its library; this line only says so
    try:
        with open("/proc/self/maps") as maps:
            files = dict.fromkeys(line.split(maxsplit=5)[5].strip() for line in maps if line.count("/"))
    except OSError:
        return []
    found = [(name, path) for path in files for name in _LIBRARIES if path.rpartition("/")[2].startswith(name)]
    return [path for _, path in sorted(found, key=lambda pair: _LIBRARIES.index(pair[0]))]
