"""The options of `llmserve serve` for the APIs of OpenAI, Anthropic and Ollama."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmserve.errors import InvalidArgument

if TYPE_CHECKING:
    from llmserve.frontends.shared.text_settings import TextSettings

TEXT_APIS = "OpenAI's API"


class UnknownFields(StrEnum):
    """What happens to fields of a request that have no effect on the answer."""

    WARN = "warn"
    REFUSE = "refuse"


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of the only LLM in these APIs; may be repeated.",
            show_default="its model's",
            rich_help_panel=TEXT_APIS,
        ),
    ] = None
    any_model_name: Annotated[
        bool,
        typer.Option(
            "--any-model-name", help="Accept every model name, if there is one LLM.", rich_help_panel=TEXT_APIS
        ),
    ] = False
    chat_template: Annotated[
        Path | None,
        typer.Option(
            help="File with a Jinja chat template to use in place of the checkpoint's.",
            show_default="the checkpoint's",
            rich_help_panel=TEXT_APIS,
        ),
    ] = None
    default_chat_template_kwargs: Annotated[
        str | None,
        typer.Option(
            help='JSON object of further names for the chat template, such as {"enable_thinking": false}.',
            show_default="none",
            rich_help_panel=TEXT_APIS,
        ),
    ] = None
    allow_chat_template: Annotated[
        bool,
        typer.Option(
            "--allow-chat-template",
            help="Let requests bring a chat template, which runs in a process with limits.",
            rich_help_panel=TEXT_APIS,
        ),
    ] = False
    checkpoint_sampling: Annotated[
        bool,
        typer.Option(
            help="Sampling defaults of the checkpoint's generation_config.json; else OpenAI's.",
            rich_help_panel=TEXT_APIS,
        ),
    ] = True
    batch_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for /v1/files and /v1/batches, kept over a restart.",
            show_default="none: they are off",
            rich_help_panel=TEXT_APIS,
        ),
    ] = None
    stored_responses: Annotated[
        int,
        typer.Option(
            help="Most responses kept in memory, for an hour, for previous_response_id; 0: none.",
            min=0,
            rich_help_panel=TEXT_APIS,
        ),
    ] = 1000
    unknown_fields: Annotated[
        UnknownFields,
        typer.Option(
            help="Fields that are unknown, or change no answer. warn: name them in the answer's member warning.",
            rich_help_panel=TEXT_APIS,
        ),
    ] = UnknownFields.WARN


def text_settings(options: TextOptions) -> TextSettings:
    from llmserve.frontends.shared.text_settings import TextSettings

    return TextSettings(
        refuses_unknown_fields=options.unknown_fields == UnknownFields.REFUSE,
        served_names=tuple(dict.fromkeys(options.served_model_name or ())),
        takes_any_name=options.any_model_name,
        batch_dir=options.batch_dir,
        stored_responses=options.stored_responses,
        checkpoint_sampling=options.checkpoint_sampling,
        template_values=_object(options.default_chat_template_kwargs or "{}", "--default-chat-template-kwargs"),
    )


def _object(text: str, flag: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidArgument(f"{flag} must be a JSON object, got {text[:50]!r}")
    return found
