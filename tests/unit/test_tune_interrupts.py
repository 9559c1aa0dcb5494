import os
import signal

import pytest

from seqmoe.autotune.interrupts import shielded, terminable


def test_an_interrupt_waits_until_the_block_is_over():
    done = []
    with pytest.raises(KeyboardInterrupt), shielded():
        with shielded():
            os.kill(os.getpid(), signal.SIGINT)
            done.append(1)
        done.append(2)  # pragma: no cover (the inner block's end is where it comes)
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_an_interrupt_nothing_happens_and_errors_pass():
    with shielded():
        pass
    with pytest.raises(ValueError), shielded():
        raise ValueError


def test_sigterm_ends_as_ctrl_c_does():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), terminable():
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with shielded():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
