"""The options of `llmserve serve` for the APIs of OpenAI, Anthropic and Ollama."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmserve.cli.dataclass_command import option
from llmserve.errors import InvalidArgument, raise_problems

if TYPE_CHECKING:
    from llmserve.frontends.shared.text_settings import TextSettings

text_option = partial(option, panel="OpenAI's API")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")  # fields that may have defaults


class UnknownFields(StrEnum):
    """How fields of a request without an effect on the answer are handled."""

    WARN = "warn"
    REFUSE = "refuse"


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    served_model_name: list[str] | None = text_option(
        None, "Name of the only LLM in these APIs; may be repeated.", show_default="its model's"
    )
    any_model_name: bool = text_option(False, "Accept every model name, if there is one LLM.", "--any-model-name")
    chat_template: Path | None = text_option(
        None,
        "A Jinja chat template (a file, or a built-in name) to use instead of the checkpoint's.",
        show_default="the checkpoint's",
    )
    default_chat_template_kwargs: str | None = text_option(
        None,
        'JSON object of additional variables for the chat template, such as {"enable_thinking": false}.',
        show_default="none",
    )
    allow_chat_template: bool = text_option(
        False, "Allow a chat template in requests; it runs in a process with limits.", "--allow-chat-template"
    )
    default_sampling: str | None = text_option(
        None,
        'JSON object of sampling defaults that override the checkpoint\'s, such as {"temperature": 0.7}.',
        show_default="none",
    )
    enable_force_include_usage: bool = text_option(
        False, "Include the usage in every chunk of a stream.", "--enable-force-include-usage"
    )
    enable_per_request_metrics: bool = text_option(
        False, "Include the times of each request in its answer, as metrics.", "--enable-per-request-metrics"
    )
    return_tokens_as_token_ids: bool = text_option(
        False, "Write tokens as token_id:ID in log probs, unless a request sets this.", "--return-tokens-as-token-ids"
    )
    checkpoint_sampling: bool = text_option(
        True, "Sampling defaults of the checkpoint's generation_config.json; else OpenAI's."
    )
    batch_dir: Path | None = text_option(
        None, "Folder for /v1/files and /v1/batches, kept after a restart.", show_default="none: they are off"
    )
    stored_responses: int = text_option(
        1000, "Maximum number of responses kept in memory for an hour, for previous_response_id; 0: none.", min=0
    )
    unknown_fields: UnknownFields = text_option(
        UnknownFields.WARN,
        "Unknown fields, and fields that change no answer. warn: list them in the answer's warning.",
    )


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
    """Sampling defaults, checked like those of requests."""
    found = _object(text, flag)
    problems = [f"unknown field '{name}'; known: {', '.join(SAMPLING)}" for name in found if name not in SAMPLING]
    if found and not problems:
        from llmserve.frontends.text.requests.fields import sampling_problems

        problems = sampling_problems(found)
    raise_problems(InvalidArgument, f"{flag} is invalid", problems)
    return found


def _object(text: str, flag: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidArgument(f"{flag} must be a JSON object, got {text[:50]!r}")
    return found
