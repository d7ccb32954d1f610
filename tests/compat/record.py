"""What the real server answered, group by group: `recorded/<group>.json`, one line a case, written by `make compat`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tests.compat.observe import Json

FOLDER = Path(__file__).parent / "recorded"


def load(group: str) -> Mapping[str, Json]:
    path = FOLDER / f"{group}.json"
    recorded: Mapping[str, Json] = json.loads(path.read_text()) if path.exists() else {}
    return recorded


def store(group: str, observed: Mapping[str, Json]) -> None:
    lines = [
        f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False, sort_keys=True)}"
        for name, value in observed.items()
    ]
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{group}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
