"""What `llmserve chat` sends to the served model for a conversation: messages where it takes them, else text.

Ensembles written for tensorrtllm_backend take text alone. Then the chat format is applied here, with the tokenizer that
the user names, or that the server's models read if that directory is on this machine too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.cli.pipelines import TOKENIZER_PATH
from llmserve.client import AsyncClient, Prompt
from llmserve.errors import LlmserveError
from llmserve.stages.chat import Message, TemplateFormat, chat_format
from llmserve.stages.files import TextFiles
from llmserve.stages.tokenizer import tokenizer_of

NO = ("false", "0", "f", "n", "no")
EMPTY_WORDS = {"bad_words": "", "stop_words": ""}  # required by the oldest ensembles


class Prompts(Protocol):
    @property
    def note(self) -> str:
        """What the user should know about how it is done; may be empty."""
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
    """The chat format is applied here. `begin` is what the server's own tokenizer puts before every text."""

    format: TemplateFormat
    begin: str
    note: str

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> Prompt:
        text = self.format.text([Message(message["role"], message["content"]) for message in messages])
        return text.removeprefix(self.begin)


@dataclass(frozen=True, slots=True)
class AsPlainText:
    """The question, and nothing of what was said before."""

    note: str

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> Prompt:
        return messages[-1]["content"]


async def prompts_for(client: AsyncClient, tokenizer_dir: Path | None) -> Prompts:
    """How the model of `client` is asked. Raises `LlmserveError` for a `tokenizer_dir` that cannot be read."""
    config = await client.config()
    inputs = {entry.name for entry in config.input}
    if "messages" in inputs or "text_input" not in inputs:
        return AsMessages()
    lacking = f"model '{config.name}' takes text, not messages"
    steps = [await _config(client.url, step.model_name) for step in config.ensemble_scheduling.step]
    given = [tokenizer_dir] if tokenizer_dir else _tokenizer_dirs(steps)
    for directory in given:
        try:
            return _with_tokenizer(directory, steps, lacking)
        except LlmserveError:
            if tokenizer_dir:
                raise
    return AsPlainText(
        f"{lacking}: each question is sent as it is, without a chat format and without what was said before; "
        "--tokenizer-dir DIR (an engine or a checkpoint) has the format applied here"
    )


def more_inputs(config: ModelConfig, parameters: Mapping[str, int | float]) -> dict[str, int | float | str]:
    """The parameters under the model's own names, and empty word lists for a model that requires them."""
    inputs = {entry.name: entry for entry in config.input}
    named: dict[str, int | float | str] = dict(parameters)
    if "seed" in named and "seed" not in inputs and "random_seed" in inputs:
        named["random_seed"] = named.pop("seed")
    return named | {name: text for name, text in EMPTY_WORDS.items() if name in inputs and not inputs[name].optional}


async def _config(url: str, model: str) -> ModelConfig:
    async with AsyncClient(url, model=model) as client:
        return await client.config()


def _tokenizer_dirs(steps: Sequence[ModelConfig]) -> list[Path]:
    """Those of the server's models that are on this machine, too."""
    named = [step.parameters[TOKENIZER_PATH].string_value for step in steps if TOKENIZER_PATH in step.parameters]
    return [path for name in dict.fromkeys(named) if name and (path := Path(name)).is_absolute() and path.is_dir()]


def _with_tokenizer(directory: Path, steps: Sequence[ModelConfig], lacking: str) -> Prompts:
    files = TextFiles.read(directory)
    tokenizer = tokenizer_of(files)
    found = chat_format(tokenizer, files)
    if isinstance(found, TemplateFormat):
        adds_begin = not any(_says_no(step, "add_special_tokens") for step in steps)
        begin = files.special_tokens.get("bos_token", "") if adds_begin and tokenizer.encode("", True) else ""
        return AsFormattedText(found, begin, f"{lacking}: the chat format of {directory} is applied here")
    reason = "has no chat format" if found is None else "marks who speaks with tokens that no text can spell"
    return AsPlainText(
        f"{lacking}, and {directory} {reason}: each question is sent as it is, without what was said before; "
        "llmserve's own ensemble takes messages"
    )


def _says_no(config: ModelConfig, parameter: str) -> bool:
    return parameter in config.parameters and config.parameters[parameter].string_value.lower() in NO
