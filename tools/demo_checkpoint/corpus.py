"""Pairs of (docstring body, docstring summary) from Python sources, cleaned; nothing is imported or executed."""

from __future__ import annotations

import ast
import hashlib
import json
import random
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

MAX_DOCUMENT_CHARS = 400  # positions after 160 tokens are never trained
MIN_DOCUMENT_CHARS = 50
SUMMARY_WORDS = range(3, 25)

_SKIPPED_DIRS = frozenset({"test", "tests", "testing", "_vendor", "vendor", "__pycache__", "site-packages"})
_DROPPED_LINE = re.compile(r"^(?:>>>|\.\.\.(?: |$)|[-=~^*#_+.]{3,}$)|https?://|www\.")
_SIGNATURE = re.compile(r"^[\w.]+\s*\(.*\)\s*(?:->|$|:|=|--)|->|^\w+\s*=\s")
_HEADING = re.compile(r"^(?:[:@.*|>#$%<{\[(\-=~]|usage\b|example|param|note\b|todo\b|module:|see\b)|:$", re.IGNORECASE)
_LICENCE = re.compile(r"copyright|licen[cs]e[ds]?\b|\(c\)|all rights reserved|auto-?generated", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Pair:
    """`id` is `<origin>:<dotted module>:<name>`; `package` is the top-level package it comes from."""

    id: str
    package: str
    document: str
    summary: str


def collect(roots: Iterable[Path], origin: str) -> Iterator[Pair]:
    """Every clean pair of every source file under the roots, in a stable order, including repeated texts."""
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            relative = path.relative_to(root)
            if not _is_test(relative):
                yield from _pairs_of(path, relative, origin)


def _is_test(relative: Path) -> bool:
    name = relative.stem
    return bool(_SKIPPED_DIRS & set(relative.parts)) or name.startswith(("test_", "conftest")) or name.endswith("_test")


def _pairs_of(path: Path, relative: Path, origin: str) -> Iterator[Pair]:
    module = ".".join(relative.with_suffix("").parts)
    for name, docstring in docstrings(path.read_text(encoding="utf-8", errors="replace")):
        split = split_docstring(docstring)
        if split is not None:
            yield Pair(f"{origin}:{module}:{name}", relative.parts[0].removesuffix(".py"), *split)


def docstrings(source: str) -> Iterator[tuple[str, str]]:
    """(name, docstring) of the module, its classes and functions; empty if the source does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in packages' strings
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield getattr(node, "name", "<module>"), docstring


def split_docstring(docstring: str) -> tuple[str, str] | None:
    """(document, summary), cleaned; None if it is not a useful pair."""
    head, _, rest = docstring.strip().partition("\n\n")
    summary = " ".join(head.split())
    document = clean_document(rest)
    return (document, summary) if is_good_summary(summary) and len(document) >= MIN_DOCUMENT_CHARS else None


def clean_document(text: str) -> str:
    """Lines without indentation, doctests, URLs and underlines, cut at a line or word to MAX_DOCUMENT_CHARS."""
    lines = [line.strip() for line in text.splitlines()]
    kept = "\n".join(" ".join(line.split()) for line in lines if line and not _DROPPED_LINE.search(line))
    if len(kept) <= MAX_DOCUMENT_CHARS:
        return kept
    cut = kept[: MAX_DOCUMENT_CHARS + 1]
    return cut[: max(cut.rfind(" "), cut.rfind("\n"), 0) or MAX_DOCUMENT_CHARS].rstrip()


def is_good_summary(summary: str) -> bool:
    """A plain English phrase: ASCII, 3 to 24 words, no signature, heading, licence or URL."""
    return (
        summary.isascii()
        and len(summary.split()) in SUMMARY_WORDS
        and not any(pattern.search(summary) for pattern in (_SIGNATURE, _HEADING, _LICENCE, _DROPPED_LINE))
        and sum(c.isalpha() or c == " " for c in summary) >= 0.75 * len(summary)
    )


def deduplicate(pairs: Iterable[Pair]) -> list[Pair]:
    """The first of all pairs with the same document or the same (document's beginning, summary), ignoring case."""
    seen: set[str] = set()
    kept = []
    for pair in pairs:
        keys = {pair.document.lower(), f"{pair.document[:80].lower()}\0{pair.summary.lower()}"}
        if not keys & seen:
            kept.append(pair)
        seen |= keys
    return kept


def cap_per_package(pairs: Iterable[Pair], cap: int, seed: int) -> list[Pair]:
    """At most `cap` pairs of one package, drawn with the seed, in a shuffled order."""
    groups: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        groups[pair.package].append(pair)
    generator = random.Random(seed)
    kept = [pair for name in sorted(groups) for pair in generator.sample(groups[name], min(cap, len(groups[name])))]
    generator.shuffle(kept)
    return kept


def select_evaluation_pairs(pairs: Iterable[Pair], count: int, *, per_package: int, seed: int) -> list[Pair]:
    """`count` pairs in the order of a keyed hash of their ids: the choice depends only on the sources."""
    chosen: list[Pair] = []
    taken: dict[str, int] = defaultdict(int)
    for pair in sorted(deduplicate(pairs), key=lambda pair: hashlib.sha256(f"{seed}:{pair.id}".encode()).digest()):
        if len(chosen) < count and taken[pair.package] < per_package:
            taken[pair.package] += 1
            chosen.append(pair)
    return chosen


def write_pairs(path: Path, pairs: Iterable[Pair]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(pair)) + "\n" for pair in pairs), encoding="utf-8")


def read_pairs(path: Path) -> list[Pair]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Pair(row["id"], row.get("package", ""), row["document"], row["summary"]) for row in rows]
