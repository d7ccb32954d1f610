"""The forms of tool calls that are known, and which of them a chat template is of."""

from __future__ import annotations

from collections.abc import Mapping

from llmserve.stages.tool_formats.hermes import BEGIN, Hermes
from llmserve.stages.tool_formats.llama3 import PYTHON_TAG, Llama3
from llmserve.stages.tool_formats.mistral import ARGS, CALLS, Mistral, MistralNamed
from llmserve.stages.tool_formats.tool_format import ToolFormat

TOOL_FORMATS: Mapping[str, ToolFormat] = {each.name: each for each in (Hermes(), Llama3(), Mistral(), MistralNamed())}
OTHERS_IN_TAGS = ("<function=", "<arg_key>")  # Qwen3-Coder's and GLM's: the same tag around something else


def found_tool_format(template: str) -> str:
    """Its name, by what a chat template writes; empty: none that is known."""
    if CALLS in template:
        return MistralNamed().name if ARGS in template else Mistral().name
    if BEGIN in template and not any(other in template for other in OTHERS_IN_TAGS):
        return Hermes().name
    is_llama = "<|start_header_id|>" in template and '"parameters"' in template
    return Llama3().name if PYTHON_TAG in template or is_llama else ""
