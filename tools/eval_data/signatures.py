"""Signatures of functions, and their contents as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from tools.eval_data.definitions import Definition
from tools.eval_data.order import in_keyed_order

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}\Z")
PARAMETER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,15}\Z")
NUM_PARAMETERS = range(2, 6)
LONGEST = 80  # characters of a signature


def signature_rows(found: Iterable[Definition], count: int, seed: int) -> list[dict[str, object]]:
    """Returns `count` functions, at most one per module."""
    by_module: dict[str, list[Definition]] = {}
    for each in found:
        if _is_plain(each):
            by_module.setdefault(each.module, []).append(each)
    rows: list[dict[str, object]] = []
    for module in in_keyed_order(by_module, f"{seed}:module")[:count]:
        names = {each.name: each for each in by_module[module]}
        chosen = names[in_keyed_order(names, f"{seed}:{module}")[0]]
        expected = json.dumps({"name": chosen.name, "parameters": list(chosen.parameters)})
        rows.append({"id": f"{module}:{chosen.name}", "signature": f"def {chosen.signature}", "json": expected})
    assert len(rows) == count, f"{len(rows)} of {count} signatures"
    return rows


def _is_plain(each: Definition) -> bool:
    return (
        NAME.match(each.name) is not None
        and len(each.parameters) in NUM_PARAMETERS
        and all(map(PARAMETER.match, each.parameters))
        and len(each.signature) <= LONGEST
    )
