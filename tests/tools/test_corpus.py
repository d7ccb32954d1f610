from __future__ import annotations

from pathlib import Path

import pytest

from tools.demo_checkpoint import corpus
from tools.demo_checkpoint.corpus import Pair
from tools.demo_checkpoint.decontaminate import Decontaminator

BODY = "The file is opened in text mode and every line of it is read, stripped and returned."
SOURCE = f'''"""Module summary of three words.

{BODY}
"""

class Reader:
    """Read lines from an open file.

    {BODY}
    >>> Reader().read()
    See https://example.org/reader for more.
    ----------
    """

    def read(self):
        """Read."""

    async def close(self): "no body here"
'''


def pair(document: str = BODY, summary: str = "Read every line.", package: str = "p", id: str = "x") -> Pair:
    return Pair(id, package, document, summary)


def test_docstrings_of_modules_classes_and_functions() -> None:
    assert [name for name, _ in corpus.docstrings(SOURCE)] == ["<module>", "Reader", "read", "close"]
    assert list(corpus.docstrings("def broken(:")) == []
    assert list(corpus.docstrings("x = '\\0'\0")) == []


def test_a_docstring_splits_into_document_and_summary() -> None:
    split = dict(corpus.docstrings(SOURCE))
    assert corpus.split_docstring(split["Reader"]) == (BODY, "Read lines from an open file.")
    assert corpus.split_docstring(split["read"]) is None
    assert corpus.split_docstring(f"A summary that\nis wrapped.\n\n{BODY}") == (BODY, "A summary that is wrapped.")


def test_documents_are_cut_at_a_word() -> None:
    cut = corpus.clean_document("word " * 200)
    assert len(cut) <= corpus.MAX_DOCUMENT_CHARS
    assert cut.endswith("word")
    assert len(corpus.clean_document("x" * 900)) == corpus.MAX_DOCUMENT_CHARS


@pytest.mark.parametrize(
    "summary",
    [
        "Two words", "word " * 25, "open(path, mode) -> file", "open(path)", "Parameters of this function:",
        ":param path: the path to open", "Copyright 2020 by the authors.", "Caf\u00e9 opens at nine.",
        "See https://example.org for more", "-----  ----- -----", "x = 1 2 3 4",
    ],
)  # fmt: skip
def test_useless_summaries_are_dropped(summary: str) -> None:
    assert not corpus.is_good_summary(summary)


def test_a_plain_phrase_is_a_good_summary() -> None:
    assert corpus.is_good_summary("Return the first line of the file's header.")


def test_collect_reads_files_and_skips_tests(tmp_path: Path) -> None:
    for name in ("package/mod.py", "package/tests/mod.py", "package/test_mod.py", "single.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(SOURCE)
    pairs = list(corpus.collect([tmp_path], "origin"))
    assert [p.id for p in pairs] == [
        f"origin:{module}:{name}" for module in ("package.mod", "single") for name in ("<module>", "Reader")
    ]
    assert [p.package for p in pairs] == ["package", "package", "single", "single"]
    corpus.write_pairs(tmp_path / "out" / "pairs.jsonl", pairs)
    assert corpus.read_pairs(tmp_path / "out" / "pairs.jsonl") == pairs


def test_repeated_texts_are_dropped_and_packages_capped() -> None:
    same = [pair(id="1"), pair(BODY.upper(), "Another summary here.", id="2"), pair(BODY + " More.", id="3")]
    assert [p.id for p in corpus.deduplicate(same)] == ["1"]
    many = [pair(f"{i} {BODY}", f"Summary number {i}.", "big" if i < 50 else "small", str(i)) for i in range(53)]
    kept = corpus.cap_per_package(corpus.deduplicate(many), 5, seed=1)
    assert sorted(p.package for p in kept) == ["big"] * 5 + ["small"] * 3
    assert kept == corpus.cap_per_package(corpus.deduplicate(many), 5, seed=1)
    assert kept != corpus.cap_per_package(corpus.deduplicate(many), 5, seed=2)


def test_the_choice_of_evaluation_pairs_does_not_depend_on_the_order() -> None:
    many = [pair(f"{i} {BODY}", f"Summary number {i}.", f"package{i % 4}", str(i)) for i in range(40)]
    chosen = corpus.select_evaluation_pairs(many, 6, per_package=2, seed=0)
    assert chosen == corpus.select_evaluation_pairs(many[::-1], 6, per_package=2, seed=0)
    assert len(chosen) == 6
    assert max([p.package for p in chosen].count(f"package{i}") for i in range(4)) == 2


@pytest.mark.parametrize(
    ("near", "is_near"),
    [
        (pair("Something else, then: the file is opened in text mode and every line", "Unlike anything."), True),
        (pair("A body without shared words", "Quickly read every single line of files."), True),
        (pair("A body without shared words", "line every single files of read"), True),
        (pair("A body without shared words", "Close the database connection."), False),
        (pair("The file is opened in text mode", "Every line."), False),
    ],
)
def test_pairs_near_an_evaluation_pair_are_found(near: Pair, is_near: bool) -> None:
    assert Decontaminator([pair(BODY, "Read every single line of files.")]).is_near(near) == is_near


def test_the_committed_evaluation_pairs_are_clean() -> None:
    pairs = corpus.read_pairs(Path(__file__).resolve().parents[2] / "eval" / "data" / "docstrings.jsonl")
    assert len(pairs) == 500
    assert all(p.id.startswith("py3.11:") for p in pairs)
    assert all(corpus.MIN_DOCUMENT_CHARS <= len(p.document) <= corpus.MAX_DOCUMENT_CHARS for p in pairs)
    assert all(p.summary.isascii() and len(p.summary.split()) in corpus.SUMMARY_WORDS for p in pairs)
