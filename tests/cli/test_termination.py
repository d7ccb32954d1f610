"""Signals that end a command unwind its stack."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

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


def program(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


INTERRUPTED_WHILE_IMPORTING = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "llmserve.cli.app":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from llmserve.cli.main import main
main()
"""


def test_an_interruption_of_the_imports_ends_quietly() -> None:
    done = program(INTERRUPTED_WHILE_IMPORTING)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


LEFT_WITHIN_NATIVE_CODE = """
import threading, time
from tokenizers import Tokenizer, models, pre_tokenizers
from llmserve.cli.termination import EndPastThreads

class Slow:
    def pre_tokenize(self, text):
        is_inside.set()
        while True:
            time.sleep(0.0005)

is_inside = threading.Event()
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Slow())
end = EndPastThreads()
threading.Thread(target=tokenizer.encode, args=("a",), daemon=True).start()
is_inside.wait()
print("done")
end.code = 3
"""


def test_a_thread_that_is_left_within_native_code_does_not_abort_the_process() -> None:
    done = program(LEFT_WITHIN_NATIVE_CODE)
    assert (done.returncode, done.stdout, done.stderr) == (3, "done\n", "")
