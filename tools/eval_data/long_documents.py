"""Long documents: references of modules, with a question about one entry somewhere in them.

A document has as many modules as its length requires. The answer is the first sentence of the entry's docstring, word
for word, so it depends on text thousands of tokens before the question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.demo_checkpoint.corpus import is_good_summary
from tools.eval_data.definitions import Definition
from tools.eval_data.order import in_keyed_order

CHARACTERS = (9_500,) * 5 + (16_000,) * 2 + (29_000,)  # of a document, in turn: about 2,300, 4,000 and 7,000 tokens
NUM_PLACES = 10  # positions of the entry, from the beginning to the end


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    module: str
    text: str
    summary: str  # empty: no question is possible


def long_rows(found: Sequence[Definition], count: int, seed: int) -> list[dict[str, object]]:
    """`count` rows of document, question and summary; each begins with a different module."""
    by_module: dict[str, list[Entry]] = {}
    for each in found:
        if each.docstring:
            by_module.setdefault(each.module, []).append(_entry(each))
    modules = list(by_module)
    rows: list[dict[str, object]] = []
    for first in in_keyed_order(modules, f"{seed}:first"):
        begin = modules.index(first)
        order = [*modules[begin:], *modules[:begin]]
        row = _row([entry for module in order for entry in by_module[module]], len(rows))
        if row is not None and len(rows) < count and row["id"] not in {other["id"] for other in rows}:
            rows.append(row)
    assert len(rows) == count, f"{len(rows)} of {count} documents"
    return rows


def _entry(each: Definition) -> Entry:
    docstring = each.docstring.strip()
    summary = " ".join(docstring.partition("\n\n")[0].split())
    indented = "\n".join(f"    {line}".rstrip() for line in docstring.splitlines())
    is_asked = is_good_summary(summary) and summary.endswith(".") and summary.count(". ") == 0
    return Entry(each.name, each.module, f"{each.signature}\n{indented}\n\n", summary if is_asked else "")


def _row(entries: Sequence[Entry], number: int) -> dict[str, object] | None:
    """Returns None if no entry near the intended place is suitable."""
    wanted = CHARACTERS[number % len(CHARACTERS)]
    parts: list[str] = []
    kept: list[Entry] = []
    for entry in entries:
        heading = f"# {entry.module}\n\n" if not kept or kept[-1].module != entry.module else ""
        if sum(map(len, parts)) + len(heading) + len(entry.text) > wanted:
            break
        parts.append(heading + entry.text)
        kept.append(entry)
    document = "".join(parts).rstrip()
    if len(document) < 0.9 * wanted:
        return None
    names, summaries = ([getattr(entry, what) for entry in kept] for what in ("name", "summary"))
    place = (7 * number % NUM_PLACES + 0.5) / NUM_PLACES * len(kept)
    asked = [
        (abs(index - place), entry)
        for index, entry in enumerate(kept)
        if entry.summary and names.count(entry.name) == 1 and summaries.count(entry.summary) == 1
    ]
    if not asked:
        return None
    _, entry = min(asked, key=lambda one: one[0])
    return {
        "id": f"{entry.module}:{entry.name}", "document": document, "name": entry.name, "summary": entry.summary
    }  # fmt: skip
