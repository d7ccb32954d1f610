"""A digest of the meaning of an engine's token ids: engines with equal digests can exchange ids."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from llmserve.engine.directory.artifact import EngineDirectory

JSON_FILE, MODEL_FILE = "tokenizer.json", "tokenizer.model"


def tokenizer_digests(directory: EngineDirectory) -> dict[str, str]:
    """Digests by the names of an engine's files: of the tokens with their ids, or of a whole file.

    They do not cover how text is split into tokens, templates, or names of special tokens.
    """
    files = directory.manifest.files
    found = {}
    if JSON_FILE in files:
        try:
            found[JSON_FILE] = _digest(json.loads((directory.path / JSON_FILE).read_text()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # in an unknown format
            found[JSON_FILE] = files[JSON_FILE].sha256
    if MODEL_FILE in files:
        found[MODEL_FILE] = files[MODEL_FILE].sha256
    return found


def _digest(content: dict[str, Any]) -> str:
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, dict):
        tokens = {(number, token) for token, number in vocabulary.items()}
    else:  # pairs of a piece and its score
        tokens = {(number, token) for number, (token, _) in enumerate(vocabulary)}
    tokens |= {(added["id"], added["content"]) for added in content.get("added_tokens") or ()}
    return hashlib.sha256(json.dumps(sorted(tokens)).encode()).hexdigest()
