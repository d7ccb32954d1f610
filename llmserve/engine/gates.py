"""gates.json in an engine directory: what evaluations have said of this engine, the last word of each suite.

It lies beside the manifest, which does not know it: an engine is the same before and after it was judged.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from llmserve.errors import InvalidArgument

GATES_FILE = "gates.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class GateRecord:
    suite: str
    suite_digest: str
    passed: bool
    verdict: str
    num_samples: int


def read_gates(directory: Path, engine_digest: str) -> Sequence[GateRecord]:
    """By suite; none where the file is missing, unreadable, or about another engine."""
    try:
        document = json.loads((directory / GATES_FILE).read_text())
        if (document["format"], document["engine_digest"]) != (FORMAT, engine_digest):
            return ()
        known = {field.name for field in fields(GateRecord)}
        records = [
            GateRecord(**{name: gate[name] for name in known if name != "suite"}, suite=suite)
            for suite, gate in sorted(document["gates"].items())
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ()
    return tuple(records)


def record_gate(directory: Path, engine_digest: str, record: GateRecord) -> None:
    """In place of what was said for the same suite. Raises `InvalidArgument` where the directory cannot be written."""
    records = {each.suite: each for each in (*read_gates(directory, engine_digest), record)}
    gates = {suite: {name: value for name, value in asdict(each).items() if name != "suite"}
             for suite, each in sorted(records.items())}  # fmt: skip
    document = {"format": FORMAT, "engine_digest": engine_digest, "gates": gates}
    draft = directory / f".{GATES_FILE}"
    try:
        draft.write_text(json.dumps(document, indent=2) + "\n")
        draft.replace(directory / GATES_FILE)
    except OSError as error:
        raise InvalidArgument(f"{directory / GATES_FILE} cannot be written: {error.strerror}") from error
