"""A small suite with its data, for the tests of what reads one."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import yaml

NOUNS = ("file", "socket", "database", "book", "letter", "window", "archive", "stream")
VERBS = ("read", "written", "checked", "copied")
ROWS = [
    {
        "id": f"row-{i}",
        "document": f"the {word} was opened, then {verb} and closed again",
        "summary": f"The {word} {verb}.",
    }
    for i, (word, verb) in enumerate(product(NOUNS, VERBS))
]  # as many as a gate needs to clear an engine, and two more
CONTENT: dict[str, Any] = {
    "name": "tiny",
    "data": {"path": "rows.jsonl"},
    "columns": {"id": "id", "reference": "summary"},
    "messages": [{"role": "user", "content": "Summarize:\n{document}"}],
    "num_samples": len(ROWS),
    "max_tokens": 8,
    "margins": {"rougeL": 10.0},  # of a baseline of 100: so few rows may have missed a spoiled answer
    "baselines": "baselines",
}


def write_suite(folder: Path, **changes: Any) -> Path:
    """`CONTENT` with changes as suite.yaml beside its rows.jsonl; a change to None removes the key."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {key: value for key, value in (CONTENT | changes).items() if value is not None}
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    path = folder / "suite.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def write_choice_suite(folder: Path, **changes: Any) -> Path:
    """The same as multiple choice: which of four summaries is the document's?"""
    path = write_suite(
        folder,
        **{
            "data": {"path": "choices.jsonl"},
            "columns": {"id": "id", "reference": "answer", "choices": "choices"},
            "max_tokens": None,
            "margins": {"acc": 10.0},
        }
        | changes,
    )
    rows = [
        {"id": row["id"], "document": row["document"], "choices": _choices(i), "answer": i % 4}
        for i, row in enumerate(ROWS)
    ]
    (folder / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _choices(index: int) -> list[str]:
    """The right one is at the place of the index modulo 4."""
    wrong = [ROWS[(index + 5 * step) % len(ROWS)]["summary"] for step in (1, 2, 3)]
    return [*wrong[: index % 4], ROWS[index]["summary"], *wrong[index % 4 :]]
