"""Short documents with some long ones among them: a quick suite that also tests long prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tools.demo_checkpoint.corpus import Pair

EVERY = 6  # every 6th row is long
CHARACTERS = 1_400  # at most, of a long document: about 400 of the demo's tokens


def mixed_rows(pairs: Sequence[Pair], count: int) -> list[dict[str, object]]:
    """The first pairs unchanged; a long row joins documents from the end and asks for the summary of its last one."""
    short, rest = iter(pairs), reversed(pairs)
    return [_long_row(rest) if number % EVERY == EVERY - 1 else _row(next(short)) for number in range(count)]


def _row(pair: Pair) -> dict[str, object]:
    return {"id": pair.id, "document": pair.document, "summary": pair.summary}


def _long_row(rest: Iterator[Pair]) -> dict[str, object]:
    pair = next(rest)
    document = pair.document
    while len(document) + len((other := next(rest)).document) < CHARACTERS:
        document = f"{other.document}\n\n{document}"
    return {"id": f"long:{pair.id}", "document": document, "summary": pair.summary}
