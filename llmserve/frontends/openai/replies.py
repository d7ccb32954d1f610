"""Parts of replies that OpenAI's APIs share."""

from __future__ import annotations

import secrets

from llmserve.frontends.http.json_fields import Json
from llmserve.frontends.openai.generation import Usage

LIMITS = ("length", "timed_out")  # finish reasons of an answer that something cut off


def new_id(prefix: str, separator: str = "-") -> str:
    return f"{prefix}{separator}{secrets.token_hex(12)}"


def finish_reason(reason: str) -> str | None:
    """OpenAI's word for TensorRT-LLM's; None while the answer goes on."""
    if not reason:
        return None
    return "length" if reason in LIMITS else "stop"


def usage_document(usage: Usage | None) -> Json:
    if usage is None:
        return None
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
