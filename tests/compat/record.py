"""What the real server answered, group by group, one line a case, written by `make compat`.

`recorded/<group>.json` has what a case sees, `recorded/exchanges/<group>.json` what went over the wire for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.compat.exchanges import without_circumstances
from tests.compat.observe import Json
from tools.servers import Exchange

FOLDER = Path(__file__).parent / "recorded"


def load(group: str) -> Mapping[str, Json]:
    path = FOLDER / f"{group}.json"
    recorded: Mapping[str, Json] = json.loads(path.read_text()) if path.exists() else {}
    return recorded


def load_exchanges(group: str) -> Mapping[str, Sequence[Exchange]]:
    return load(f"exchanges/{group}")


def store_exchanges(group: str, seen: Mapping[str, Sequence[Exchange]]) -> None:
    store(f"exchanges/{group}", {name: list(map(without_circumstances, exchanges)) for name, exchanges in seen.items()})


def store(group: str, observed: Mapping[str, Json]) -> None:
    lines = [
        f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False, sort_keys=True)}"
        for name, value in observed.items()
    ]
    path = FOLDER / f"{group}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
