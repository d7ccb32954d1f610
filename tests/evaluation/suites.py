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
    "margins": {"rougeL": 0.3},
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
