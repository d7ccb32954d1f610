"""`llmserve build` understands the command lines of TensorRT-LLM's build scripts."""

from __future__ import annotations

from llmserve.cli.help import GroupedHelpCommand
from llmserve.cli.trtllm_flags import BUILD


class BuildCommand(GroupedHelpCommand):
    old_flags = BUILD
