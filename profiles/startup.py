"""Starting and ending quickly: most of a short run is importing torch and Transformers, and taking them apart again."""

import atexit
import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from typing import NoReturn


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """For a block of large imports: what they make lives as long as the process, so that looking for garbage in it is
    time lost, while it grows (a sixth of the time) and at every later full collection.

    At the end it is garbage like any other again: libraries complain of what nobody has taken apart.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
        atexit.unregister(gc.unfreeze)
        atexit.register(gc.unfreeze)


def leave(code: int) -> NoReturn:
    """Ends a worker process at once: taking torch and Transformers apart in order takes seconds, and is for nobody."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
