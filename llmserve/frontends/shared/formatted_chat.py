"""The chat format of a model that only accepts text (such as tensorrtllm_backend's ensembles), applied outside of it.

The format comes from the tokenizer that the model's own steps read, if its directory is on this machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.errors import Unsupported
from llmserve.stages.chat import TemplateFormat, chat_format, messages_of
from llmserve.stages.chat_style import ChatStyle
from llmserve.stages.files import TextFiles
from llmserve.stages.tokenizer import tokenizer_of

TOKENIZER_PATH = "tokenizer_dir"  # a parameter of a model's config
NO = ("false", "0", "f", "n", "no")


@dataclass(frozen=True, slots=True)
class FormattedChat:
    """`begin` is the text that the model's own tokenizer adds before every text.

    A template may run for long, so it runs in one thread, where other requests wait for their turn.
    """

    format: TemplateFormat
    begin: str
    directory: Path
    _thread: ThreadPoolExecutor = field(
        default_factory=partial(ThreadPoolExecutor, 1, thread_name_prefix="llmserve-chat"), compare=False
    )

    def text(
        self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """`values`: more variables for the template. `tools`: in the form of OpenAI's API."""
        return self.format.text(messages_of(messages), values, tools).removeprefix(self.begin)

    async def text_in_thread(
        self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
    ) -> str:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.text, messages, values, tools)

    async def style_in_thread(self, values: Mapping[str, Any]) -> ChatStyle:
        """The style that parses answers."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.format.style, values)


def tokenizer_dirs(steps: Sequence[ModelConfig]) -> list[Path]:
    """The tokenizer directories of an ensemble's steps that are on this machine."""
    named = [step.parameters[TOKENIZER_PATH].string_value for step in steps if TOKENIZER_PATH in step.parameters]
    return [path for name in dict.fromkeys(named) if name and (path := Path(name)).is_absolute() and path.is_dir()]


def formatted_chat(directory: Path, steps: Sequence[ModelConfig]) -> FormattedChat:
    """The chat format in a directory; reading its files is slow. Raises `Unsupported` if conversations have no text
    form, and `LlmserveError` for a directory that cannot be read."""
    files = TextFiles.read(directory)
    tokenizer = tokenizer_of(files)
    found = chat_format(tokenizer, files)
    if isinstance(found, TemplateFormat):
        adds_begin = not any(_says_no(step, "add_special_tokens") for step in steps)
        begin = files.special_tokens.get("bos_token", "") if adds_begin and tokenizer.encode("", True) else ""
        return FormattedChat(found, begin, directory)
    reason = "has no chat template" if found is None else "marks roles with special tokens that have no text form"
    raise Unsupported(f"{directory} {reason}")


def _says_no(config: ModelConfig, parameter: str) -> bool:
    return parameter in config.parameters and config.parameters[parameter].string_value.lower() in NO
