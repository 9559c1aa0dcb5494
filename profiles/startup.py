"""Starting and ending quickly: most of a short run is importing torch and Transformers, and taking them apart again."""

import atexit
import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """For a block of large imports: what they make lives as long as the process, so that looking for garbage in it is
    time lost, while it grows (a sixth of the time), at every later full collection, and when the process ends (2 s)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
        atexit.unregister(gc.freeze)
        atexit.register(gc.freeze)
