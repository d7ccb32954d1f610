"""Two engines can exchange token ids: what their tokens' digest depends on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llmserve.engine.directory.vocabulary import JSON_FILE, MODEL_FILE, tokenizer_digests

BPE: dict[str, Any] = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
    "added_tokens": [{"id": 2, "content": "<s>"}],
}
UNIGRAM: dict[str, Any] = {
    "model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0], ["<s>", 0.0]]},
    "added_tokens": [],
}


def digest(folder: Path, content: Any) -> str:
    (folder / JSON_FILE).write_text(json.dumps(content))
    directory: Any = SimpleNamespace(path=folder, manifest=SimpleNamespace(files={JSON_FILE: None}))
    return tokenizer_digests(directory)[JSON_FILE]


def test_ids_and_tokens_are_what_counts(tmp_path: Path) -> None:
    known = digest(tmp_path, BPE)
    assert digest(tmp_path, BPE | {"normalizer": {"type": "NFC"}}) == known
    assert digest(tmp_path, UNIGRAM) == known
    assert digest(tmp_path, BPE | {"added_tokens": [{"id": 3, "content": "<s>"}]}) != known
    assert digest(tmp_path, BPE | {"model": BPE["model"] | {"vocab": {"a": 1, "b": 0}}}) != known


def test_a_sentencepiece_model_is_all_of_that(tmp_path: Path) -> None:
    record = SimpleNamespace(sha256="5" * 64)
    directory: Any = SimpleNamespace(path=tmp_path, manifest=SimpleNamespace(files={MODEL_FILE: record}))
    assert tokenizer_digests(directory) == {MODEL_FILE: "5" * 64}


def test_a_file_of_another_form_counts_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / JSON_FILE).write_text("[]")
    record = SimpleNamespace(sha256="7" * 64)
    directory: Any = SimpleNamespace(path=tmp_path, manifest=SimpleNamespace(files={JSON_FILE: record}))
    assert tokenizer_digests(directory) == {JSON_FILE: "7" * 64}
