"""An engine's process for tests: the one of `llmserve serve`, with guides that can be worked out by hand.

`python -m tests.contracts.engine_process [fake]`: with `fake` whatever directory is asked for has a fake engine.
"""

from __future__ import annotations

import sys

from llmserve.cli.engine_process import main
from llmserve.engine.base import Engine
from llmserve.engine.fake import fake_engine
from llmserve.engine.open import open_engine
from llmserve.engine.remote.child import ChildSpec
from llmserve.engine.remote.server import CompileGuide
from tests.contracts.guides import compile_evens

COMMAND = (sys.executable, "-m", "tests.contracts.engine_process")
FAKE = "fake"


def open_with_evens(spec: ChildSpec) -> tuple[Engine, CompileGuide]:
    return open_engine(spec.engine_dir, spec.settings), compile_evens


def open_fake(spec: ChildSpec) -> tuple[Engine, CompileGuide]:
    return fake_engine(step_delay_s=0.001), compile_evens


if __name__ == "__main__":
    sys.exit(main(open_fake if FAKE in sys.argv[1:] else open_with_evens))
