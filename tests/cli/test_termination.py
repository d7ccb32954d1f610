"""Signals that end a command unwind its stack."""

from __future__ import annotations

import os
import signal

import pytest

from llmserve.cli.termination import NUMBERS, terminated_as_exception


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_is_an_exception(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # whatever the tests were started with: nohup ignores SIGHUP
    try:
        with pytest.raises(SystemExit) as caught, terminated_as_exception():
            os.kill(os.getpid(), number)
        assert caught.value.code == 128 + number
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with terminated_as_exception():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
