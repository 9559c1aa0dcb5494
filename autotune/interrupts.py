"""Ctrl-C at the right moment: a run may be ended anywhere, a record of it must not be cut in two."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Within it SIGTERM ends what runs as Ctrl-C does: by KeyboardInterrupt, so that everything is tidied up."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until the block is over; then KeyboardInterrupt. For short blocks that write."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []
    heard = [
        number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN
    ]  # nohup and `&` ignore some
    before = {number: signal.signal(number, lambda number, frame: caught.append(number)) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
    if caught:
        raise KeyboardInterrupt
