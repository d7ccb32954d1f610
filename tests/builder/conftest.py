"""Engines for fake GPUs, which the tests of both packages use."""

from tests.engine.tensorrt_llm.conftest import build

__all__ = ["build"]
