"""What evaluations have said of an engine, in its directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llmserve.engine.gates import GATES_FILE, GateRecord, read_gates, record_gate
from llmserve.errors import InvalidArgument

PASSED = GateRecord("docstrings", "s" * 64, passed=True, verdict="pass", num_samples=500)
FAILED = replace(PASSED, passed=False, verdict="fail")
OTHER = replace(PASSED, suite="another", verdict="inconclusive")


def test_the_last_word_of_each_suite_is_kept(tmp_path: Path) -> None:
    for record in (PASSED, OTHER, FAILED):
        record_gate(tmp_path, "digest", record)
    assert read_gates(tmp_path, "digest") == (OTHER, FAILED)
    assert [path.name for path in tmp_path.iterdir()] == [GATES_FILE]


def test_it_is_about_one_engine(tmp_path: Path) -> None:
    record_gate(tmp_path, "digest", PASSED)
    assert read_gates(tmp_path, "another") == ()
    record_gate(tmp_path, "another", OTHER)
    assert read_gates(tmp_path, "another") == (OTHER,)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 1, "engine_digest": "digest", "gates": {"a": {}}}', "[" * 9999]
)
def test_what_cannot_be_read_says_nothing(tmp_path: Path, text: str) -> None:
    assert read_gates(tmp_path, "digest") == ()
    (tmp_path / GATES_FILE).write_text(text)
    assert read_gates(tmp_path, "digest") == ()


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"gone/gates.json cannot be written"):
        record_gate(tmp_path / "gone", "digest", PASSED)
