"""Prose that people read: usual words, and short sentences where a newcomer begins."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
PHRASES = {
    r"to the bit\b": "bitwise identical, or bit for bit",
    r"\b[Ww]hoever\b": "anyone who",
    r"\b[Hh]ow does it stand\b": "the subject itself, as a noun",
    r"\bha(s|ve) in it$": "Expected output",
    r"\bgoes on at another\b": "fails over to another",
    r"\bneither honoured nor ignored\b": "not supported",
}
FIRST_READ = ("README.md", "docs/getting-started.md")
MOST_WORDS = 25  # in a sentence of these


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_no_phrase_that_readers_stumble_over(page: Path) -> None:
    text = page.read_text()
    found = [
        f"line {text[: match.start()].count(chr(10)) + 1}: {match[0]!r}; write {better}"
        for phrase, better in PHRASES.items()
        for match in re.finditer(phrase, text, re.MULTILINE)
    ]
    assert found == []


@pytest.mark.parametrize("name", FIRST_READ)
def test_the_first_pages_have_short_sentences(name: str) -> None:
    text = re.sub(r"^```.*?^```$", "", (ROOT / name).read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^[|#].*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)|[`*\[\]]", "", text)
    sentences = re.split(r"(?<=[.!?:;])\s+|\n\s*\n|^\* ", text, flags=re.MULTILINE)
    assert [sentence for sentence in sentences if len(sentence.split()) > MOST_WORDS] == []
