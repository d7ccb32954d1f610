"""Prose that people read: usual words, short sentences, and pages that a non-native reader understands.

What counts is the text: no code, tables, headings or pictures. Reports in docs/benchmarks/ are written by programs.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
REPORTS = {page for page in (ROOT / "docs/benchmarks").glob("*.md") if page.name != "README.md"}
READ = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page not in REPORTS),
]
PHRASES = {
    r"to the bit\b": "bitwise identical, or bit for bit",
    r"\b[Ww]hoever\b": "anyone who",
    r"\b[Hh]ow does it stand\b": "the subject itself, as a noun",
    r"\bha(s|ve) in it$": "Expected output",
    r"\b(goes?|went) on at another\b": "fails over to another",
    r"\bneither honoured nor ignored\b": "not supported",
    r"\b[Oo]f ours\b|\b[Oo]urs\b(?! over)": "llmserve's, or the name of the thing",
    r"\b[Nn]obody\b": "no client, no user; or the passive",
    r"\bis to be (had|seen|found|told)\b": "is available, appears",
    r"\b(in|at) (whatever|whichever) (way|moment)\b": "in any way",
    r"\bas (ever|they are like)\b": "as usual",
    r"\bis said (at|by|before|to)\b": "is printed, is reported",
    r"\bgives? way\b": "is preempted",
    r"\bwants? an?\b": "requires",
    r"\b(stands|lies) (beside|behind|in front)\b": "is",
    r"\banew\b": "again",
    r"\btold apart\b": "returned separately",
    r"\bby turns\b": "in turn",
    r"\bwith a word\b": "with a message",
}
MOST_WORDS = 25  # in a sentence
LEAST_READING_EASE = 60  # Flesch's measure: 60 to 70 is plain English
FEW_WORDS = 40  # too few to measure


def prose(page: Path) -> str:
    text = re.sub(r"^```.*?^```$", "\n", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^\s*[|#<!].*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "code", text)  # one word
    return re.sub(r"\]\([^)]*\)|\*\*|[\[\]>]|https?://\S+", "", text)


def sentences(text: str) -> list[str]:
    """A colon at the end of a line ends one too: a list or a block follows."""
    ends = r"(?<=[.!?])\s+|(?<=:)\s*\n|\n\s*\n|^\s*(?:[*-]|\d+\.) "
    return [found for found in re.split(ends, text, flags=re.MULTILINE) if re.search("[A-Za-z]", found)]


def num_syllables(word: str) -> int:
    groups = len(re.findall("[aeiouy]+", word.lower()))
    return max(1, groups - bool(re.search("[^aeiouyl]e$|[^aeiouytd]ed$|[^aeiouysxzcghl]es$", word.lower())))


def reading_ease(found: list[str]) -> float:
    """Flesch's: 100 is very easy, 50 fairly difficult."""
    words = [word for sentence in found for word in re.findall("[A-Za-z]+(?:'[a-z]+)?", sentence)]
    return 206.835 - 1.015 * len(words) / len(found) - 84.6 * sum(map(num_syllables, words)) / len(words)


@pytest.mark.parametrize("page", [*READ, ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_no_phrase_that_readers_stumble_over(page: Path) -> None:
    text = page.read_text()
    found = [
        f"line {text[: match.start()].count(chr(10)) + 1}: {match[0]!r}; write {better}"
        for phrase, better in PHRASES.items()
        for match in re.finditer(phrase, text, re.MULTILINE)
    ]
    assert found == []


@pytest.mark.parametrize("page", READ, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_easy_to_read(page: Path) -> None:
    found = sentences(prose(page))
    assert [" ".join(sentence.split()) for sentence in found if len(sentence.split()) > MOST_WORDS] == []
    if sum(len(sentence.split()) for sentence in found) >= FEW_WORDS:
        assert reading_ease(found) >= LEAST_READING_EASE


def test_reading_ease_tells_plain_from_heavy() -> None:
    assert reading_ease(["The cat sat on the mat."]) > 110
    assert reading_ease(["Institutional considerations necessitate comprehensive administrative documentation."]) < 0
