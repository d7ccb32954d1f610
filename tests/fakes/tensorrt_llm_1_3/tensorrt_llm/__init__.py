"""A fake of the part of tensorrt_llm 1.3 that we use: LLM and SamplingParams; see tests/fakes/README.md."""

from tensorrt_llm.llmapi import LLM, SamplingParams
from tensorrt_llm.version import __version__

__all__ = ["LLM", "SamplingParams", "__version__"]
