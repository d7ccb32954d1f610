"""The known formats of tool calls, and which of them a chat template uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmserve.stages.harmony import CHANNEL, MESSAGE, Harmony
from llmserve.stages.tool_formats.generic import Generic
from llmserve.stages.tool_formats.hermes import BEGIN, Hermes
from llmserve.stages.tool_formats.llama3 import PYTHON_TAG, Llama3
from llmserve.stages.tool_formats.marked_calls import DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2, SEP, MarkedCalls
from llmserve.stages.tool_formats.mistral import ARGS, CALLS, Mistral, MistralNamed
from llmserve.stages.tool_formats.tagged_arguments import GLM45, MINIMAX_M2, QWEN3_CODER, SEED_OSS, TaggedArguments
from llmserve.stages.tool_formats.tool_format import ToolFormat

FORMATS: tuple[ToolFormat, ...] = (
    Hermes(), Llama3(), Mistral(), MistralNamed(), QWEN3_CODER, SEED_OSS, GLM45, MINIMAX_M2, DEEPSEEK_V3,
    DEEPSEEK_V31, KIMI_K2, Harmony(), Generic(),
)  # fmt: skip
TOOL_FORMATS: Mapping[str, ToolFormat] = {each.name: each for each in FORMATS}
DESCRIBED: Mapping[str, str] = {  # how to call a tool, for templates that have calls but do not describe tools
    each.name: each.how for each in (DEEPSEEK_V3, DEEPSEEK_V31)
}
BY_TAG: Sequence[tuple[TaggedArguments | MarkedCalls, str]] = (
    (DEEPSEEK_V3, "```json"), (DEEPSEEK_V31, SEP), (KIMI_K2, KIMI_K2.begin),
    (MINIMAX_M2, MINIMAX_M2.begin), (SEED_OSS, SEED_OSS.begin), (QWEN3_CODER, "<function="), (GLM45, "<arg_key>"),
)  # fmt: skip
OTHERS = ("<tool_calls>[", "]<]minimax[>[")  # Apriel's and MiniMax-M3's: the same tag, around something else


def found_tool_format(template: str) -> str:
    """The format's name, from the markers in a chat template; empty: unknown."""
    if CALLS in template:
        return MistralNamed().name if ARGS in template else Mistral().name
    if CHANNEL in template and MESSAGE in template:
        return Harmony().name
    for form, tag in BY_TAG:
        if form.begin in template and tag in template:
            return form.name
    if BEGIN in template and not any(other in template for other in OTHERS):
        return Hermes().name
    is_llama = "<|start_header_id|>" in template and '"parameters"' in template
    return Llama3().name if PYTHON_TAG in template or is_llama else ""
