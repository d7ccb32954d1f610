"""Parameters of a chat by name: the model's own inputs, and two names of the chat.

guide=json, guide=regex:PATTERN, guide=schema:FILE, guide=grammar:FILE     the format of an answer
log_probs=on                                                               shows the model's confidence
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.cli.chat.conversation import Value
from llmserve.errors import InvalidArgument
from llmserve.serving.signature import datatype_name
from llmserve.serving.types import NUMPY_DTYPES

GUIDE, LOG_PROBS = "guide", "log_probs"
GUIDE_FORMS = "json, regex:PATTERN, schema:FILE (or the schema itself) or grammar:FILE"
GUIDE_TYPES = {"json": "json", "regex": "regex", "schema": "json_schema", "grammar": "ebnf_grammar"}
OURS = ("text_input", "messages", "prompt_ids", "stream", "return_tokens", "num_return_sequences", "beam_width")
OWN_WORDS = {GUIDE: "guided_decoding_guide_type", LOG_PROBS: "return_log_probs"}  # to the inputs that they set
TRUE, FALSE = ("on", "true", "yes", "1"), ("off", "false", "no", "0")
NUMBERS: Mapping[str, type[int] | type[float]] = {"i": int, "u": int, "f": float}  # by the kind of numpy's type


def names(config: ModelConfig) -> list[str]:
    """Parameters that the model has and that text can set."""
    inputs = {entry.name for entry in config.input if datatype_name(entry.data_type) != "BF16"} - {*OURS}
    ours = {name for name, instead in OWN_WORDS.items() if instead in inputs}
    return sorted((inputs - {*OWN_WORDS.values(), "guided_decoding_guide"}) | ours)


def parse(config: ModelConfig, name: str, text: str) -> Value:
    """The value in the type of the model's input `name`. Raises `InvalidArgument`."""
    known = names(config)
    if name not in known:
        raise InvalidArgument(f"model '{config.name}' has no parameter {name}; it has: {', '.join(known)}")
    if name == GUIDE:
        as_inputs({GUIDE: text})  # raises if it is invalid
        return text
    datatypes = {entry.name: datatype_name(entry.data_type) for entry in config.input}
    datatype = datatypes[OWN_WORDS.get(name, name)]
    if datatype == "BYTES":
        return text
    if datatype == "BOOL":
        if text.lower() in (*TRUE, *FALSE):
            return text.lower() in TRUE
        raise InvalidArgument(f"{name}={text}: expected on or off")
    try:
        return NUMBERS[NUMPY_DTYPES[datatype].kind](text)
    except ValueError as error:
        raise InvalidArgument(f"{name}={text}: expected a number") from error


def as_inputs(parameters: Mapping[str, Value]) -> dict[str, Value]:
    """Convert the chat's names to the model's inputs. Raises `InvalidArgument` if a guide is invalid or unreadable."""
    inputs = {name: value for name, value in parameters.items() if name not in (GUIDE, LOG_PROBS)}
    if guide := str(parameters.get(GUIDE, "")):
        kind, _, text = guide.partition(":")
        if kind not in GUIDE_TYPES or (kind == "json") != (not text):
            raise InvalidArgument(f"guide={guide}: expected {GUIDE_FORMS}")
        inputs["guided_decoding_guide_type"] = GUIDE_TYPES[kind]
        if text:
            inputs["guided_decoding_guide"] = _guide(kind, text)
    if parameters.get(LOG_PROBS):
        inputs["return_log_probs"] = True
    return inputs


def _guide(kind: str, text: str) -> str:
    if kind == "regex":
        return text
    if kind == "schema" and text.lstrip().startswith("{"):
        guide = text
    else:
        try:
            guide = Path(text).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"guide={kind}:{text} cannot be read: {error}") from error
    if kind == "schema":
        try:
            json.loads(guide)
        except ValueError as error:
            raise InvalidArgument(f"guide={kind}:{text} is not JSON: {error}") from error
    return guide
