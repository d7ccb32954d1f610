"""An engine whose answers can be computed by hand. Public, for tests of code that uses engines.

runner.py   the runner, its rule, and an engine over it
runtime.py  the same from an engine directory
"""

from llmserve.engine.fake.runner import (
    FAKE_RUNNER_INFO,
    FakeRunner,
    fake_answer,
    fake_engine,
    fake_log_prob,
    fake_prompt_log_prob,
    fake_sample,
    fold,
)

__all__ = [
    "FAKE_RUNNER_INFO",
    "FakeRunner",
    "fake_answer",
    "fake_engine",
    "fake_log_prob",
    "fake_prompt_log_prob",
    "fake_sample",
    "fold",
]
