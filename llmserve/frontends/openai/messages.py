"""A conversation as an ensemble takes it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from llmserve.frontends.http.json_fields import Json
from llmserve.frontends.openai.ensembles import Ensemble, Values
from llmserve.frontends.openai.failures import Refused


def message_values(
    ensemble: Ensemble, messages: Sequence[Mapping[str, str]], template_values: Mapping[str, Json] | None = None
) -> Values:
    """Inputs of the ensemble. Raises `Refused` when it can take no conversation."""
    if not ensemble.takes_messages:
        raise Refused(
            f"model '{ensemble.name}' takes text, not messages: its ensemble has no input messages; ask for "
            "/v1/completions",
            "messages",
        )
    values: dict[str, Sequence[str]] = {"messages": [json.dumps(messages, ensure_ascii=False)]}
    if template_values:
        values["chat_template_kwargs"] = [json.dumps(template_values, ensure_ascii=False)]
    return values
