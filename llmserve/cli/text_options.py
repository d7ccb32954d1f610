"""The options of `llmserve serve` for the APIs of OpenAI, Anthropic and Ollama."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmserve.errors import InvalidArgument, raise_problems

if TYPE_CHECKING:
    from llmserve.frontends.shared.text_settings import TextSettings

TEXT_APIS = "OpenAI's API"
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")  # that have defaults


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
            help="File with a Jinja chat template, or the name of one, in place of the checkpoint's.",
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
    default_sampling: Annotated[
        str | None,
        typer.Option(
            help='JSON object of sampling defaults, before the checkpoint\'s, such as {"temperature": 0.7}.',
            show_default="none",
            rich_help_panel=TEXT_APIS,
        ),
    ] = None
    enable_force_include_usage: Annotated[
        bool,
        typer.Option(
            "--enable-force-include-usage", help="Tell the usage in every chunk of a stream.", rich_help_panel=TEXT_APIS
        ),
    ] = False
    enable_per_request_metrics: Annotated[
        bool,
        typer.Option(
            "--enable-per-request-metrics",
            help="Tell the times of each request in its answer's member metrics.",
            rich_help_panel=TEXT_APIS,
        ),
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool,
        typer.Option(
            "--return-tokens-as-token-ids",
            help="Log probs name tokens as token_id:ID, unless a request says otherwise.",
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
        forces_usage=options.enable_force_include_usage,
        names_tokens_by_id=options.return_tokens_as_token_ids,
        tells_metrics=options.enable_per_request_metrics,
        sampling=_sampling(options.default_sampling or "{}", "--default-sampling"),
        template_values=_object(options.default_chat_template_kwargs or "{}", "--default-chat-template-kwargs"),
    )


def _sampling(text: str, flag: str) -> dict[str, float]:
    """Checked as requests are."""
    found = _object(text, flag)
    problems = [f"unknown field '{name}'; known: {', '.join(SAMPLING)}" for name in found if name not in SAMPLING]
    if found and not problems:
        from llmserve.frontends.text.requests.fields import sampling_problems

        problems = sampling_problems(found)
    raise_problems(InvalidArgument, f"{flag} is wrong", problems)
    return found


def _object(text: str, flag: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidArgument(f"{flag} must be a JSON object, got {text[:50]!r}")
    return found
