"""Converts a conversation to what `llmserve chat` sends to the model: messages if it accepts them, else text.

Ensembles for tensorrtllm_backend only accept text. Then the chat format is applied here, with the tokenizer that the
user names, or the tokenizer of the server's models if its directory is on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.cli.chat.conversation import Value
from llmserve.client import AsyncClient, Prompt
from llmserve.errors import LlmserveError, Unsupported
from llmserve.frontends.shared.formatted_chat import FormattedChat, formatted_chat, tokenizer_dirs

EMPTY_WORDS = {"bad_words": "", "stop_words": ""}  # required by the oldest ensembles


class Prompts(Protocol):
    @property
    def note(self) -> str:
        """A note for the user about the form; may be empty."""
        ...

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> Prompt: ...


@dataclass(frozen=True, slots=True)
class AsMessages:
    """The server applies the chat format."""

    note: str = ""

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> Prompt:
        return messages


@dataclass(frozen=True, slots=True)
class AsFormattedText:
    """The chat format is applied here."""

    chat: FormattedChat
    note: str

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> Prompt:
        return self.chat.text(messages, {})


@dataclass(frozen=True, slots=True)
class AsPlainText:
    """Only the question is sent, without the conversation so far."""

    note: str

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> Prompt:
        return messages[-1]["content"]


async def prompts_for(client: AsyncClient, tokenizer_dir: Path | None) -> Prompts:
    """The form for the client's model. Raises `LlmserveError` if `tokenizer_dir` cannot be read."""
    config = await client.config()
    inputs = {entry.name for entry in config.input}
    if "messages" in inputs or "text_input" not in inputs:
        return AsMessages()
    lacking = f"model '{config.name}' takes text, not messages"
    steps = [await client.config_of(step.model_name) for step in config.ensemble_scheduling.step]
    given = [tokenizer_dir] if tokenizer_dir else tokenizer_dirs(steps)
    for directory in given:
        try:
            return _with_tokenizer(directory, steps, lacking)
        except LlmserveError:
            if tokenizer_dir:
                raise
    return AsPlainText(
        f"{lacking}: each question is sent unchanged, without a chat format and without the conversation so far; "
        "--tokenizer-dir DIR (an engine or a checkpoint) applies the format here"
    )


def more_inputs(config: ModelConfig, parameters: Mapping[str, Value]) -> dict[str, Value]:
    """The parameters under the model's own names, and empty word lists for a model that requires them."""
    inputs = {entry.name: entry for entry in config.input}
    named: dict[str, Value] = dict(parameters)
    if "seed" in named and "seed" not in inputs and "random_seed" in inputs:
        named["random_seed"] = named.pop("seed")
    return named | {name: text for name, text in EMPTY_WORDS.items() if name in inputs and not inputs[name].optional}


def _with_tokenizer(directory: Path, steps: Sequence[ModelConfig], lacking: str) -> Prompts:
    try:
        chat = formatted_chat(directory, steps)
    except Unsupported as reason:
        return AsPlainText(
            f"{lacking}, and {reason}: each question is sent unchanged, without the conversation so far; "
            "llmserve's own ensemble takes messages"
        )
    return AsFormattedText(chat, f"{lacking}: the chat format of {directory} is applied here")
