from __future__ import annotations

from pathlib import Path

import pytest

from llmserve.errors import InvalidArgument
from llmserve.evaluation.judging.blessing import bless, blessed_by, last_blessing, trace_of
from llmserve.evaluation.suite import load_suite
from tests.evaluation.suites import write_suite

SUITES = Path(__file__).resolve().parents[2] / "eval" / "suites"


def blessed(path: Path) -> str:
    return blessed_by(path, load_suite(path).rules())


def test_margins_count_from_their_blessing_on(tmp_path: Path) -> None:
    path = write_suite(tmp_path, loss_margins={"int8": {"kl": 0.01}})
    assert blessed(path) == ""
    changes = bless(path, load_suite(path), by="ann", why="first release")
    assert "margins.rougeL: none -> 10" in changes
    assert "loss_margins.int8.kl: none -> 0.01" in changes
    assert blessed(path) == "ann"


def test_an_edit_moves_nothing_until_somebody_blesses_it(tmp_path: Path) -> None:
    path = write_suite(tmp_path)
    bless(path, load_suite(path), by="ann", why="first release")
    (tmp_path / "others.jsonl").write_text((tmp_path / "rows.jsonl").read_text().replace("file", "folder"))
    for change in (
        {"margins": {"rougeL": 12.0}}, {"inconclusive": "pass"}, {"num_samples": 30}, {"max_tokens": 1},
        {"max_input_tokens": 9}, {"messages": [{"role": "user", "content": "Say no word on {document}"}]},
        {"data": {"path": "others.jsonl"}}, {"columns": {"reference": "document"}},
    ):  # fmt: skip
        write_suite(tmp_path, **change)
        assert blessed(path) == "", change
    write_suite(tmp_path, margins={"rougeL": 12.0})
    assert bless(path, load_suite(path), by="bob", why="int4 is new") == ["margins.rougeL: 10 -> 12"]
    assert blessed(path) == "bob"
    last = last_blessing(path)
    assert last is not None
    assert (last.by, last.why) == ("bob", "int4 is new")
    assert len(trace_of(path).read_text().splitlines()) == 2


def test_a_blessing_needs_a_name_a_reason_and_a_change(tmp_path: Path) -> None:
    path = write_suite(tmp_path)
    with pytest.raises(InvalidArgument, match=r"(?s)2 problems.*--by NAME.*--why TEXT"):
        bless(path, load_suite(path), by=" ", why="")
    bless(path, load_suite(path), by="ann", why="first release")
    with pytest.raises(InvalidArgument, match="nothing has changed since ann blessed it"):
        bless(path, load_suite(path), by="ann", why="again")


def test_an_edited_trace_is_refused(tmp_path: Path) -> None:
    path = write_suite(tmp_path)
    bless(path, load_suite(path), by="ann", why="first release")
    trace_of(path).write_text(trace_of(path).read_text().replace("10.0", "12.0"))
    with pytest.raises(InvalidArgument, match=r"line 1 of .* was changed"):
        blessed(path)


@pytest.mark.parametrize("path", sorted(SUITES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_projects_suites_are_blessed(path: Path) -> None:
    assert blessed(path)
