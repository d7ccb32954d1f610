"""The data of the suites: made the same way every time, and what is committed is what the suites say it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tools.demo_checkpoint.corpus import read_pairs
from tools.eval_data.__main__ import NUM_MIXED, PAIRS, write
from tools.eval_data.choices import choice_rows
from tools.eval_data.definitions import definitions
from tools.eval_data.long_documents import CHARACTERS, long_rows
from tools.eval_data.mixed_lengths import EVERY, mixed_rows
from tools.eval_data.signatures import signature_rows

EVAL = Path(__file__).resolve().parents[2] / "eval"
SOURCE = '''
class Reader:
    """Read the {word} lines of a file, one after the other.

    {filler}
    """

    def read(self, size: int = -1) -> bytes:
        """Return the {word} bytes of at most that size."""

    def _hidden(self): ...

async def {word}_copy(source, target, /, *, follow=True, **options):
    """Copy a {word} file to another place."""

def undocumented(a, b): ...
'''


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("library")
    for number in range(40):
        filler = f"It is the {number}th of many. " * 80
        (folder / f"module{number:02}.py").write_text(
            SOURCE.format(word=f"w{chr(97 + number % 26)}{number}", filler=filler)
        )
    for other in ("test/test_a.py", "_private.py", "package/tests/b.py"):
        (folder / other).parent.mkdir(parents=True, exist_ok=True)
        (folder / other).write_text(SOURCE.format(word="hidden", filler=""))
    (folder / "broken.py").write_text("def (:")
    return folder


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (EVAL / "data" / name).read_text().splitlines()]


def test_definitions_are_public_and_in_order(library: Path) -> None:
    found = list(definitions(library))
    assert len({each.module for each in found}) == 40
    first = [each for each in found if each.module == "module00"]
    assert [each.signature for each in first] == [
        "Reader",
        "Reader.read(self, size=-1)",
        "wa0_copy(source, target, /, *, follow=True, **options)",
        "undocumented(a, b)",
    ]
    assert first[2].parameters == ("source", "target", "follow", "options")
    assert first[1].docstring == "Return the wa0 bytes of at most that size."


def test_long_documents_hold_their_answer(library: Path) -> None:
    found = list(definitions(library))
    rows = long_rows(found, 8, seed=0)
    assert rows == long_rows(list(definitions(library)), 8, seed=0)
    assert rows != long_rows(found, 8, seed=1)
    check_long_documents(rows)


def check_long_documents(rows: list[dict[str, Any]]) -> None:
    places = []
    for number, row in enumerate(rows):
        wanted = CHARACTERS[number % len(CHARACTERS)]
        assert 0.9 * wanted <= len(row["document"]) <= wanted
        flat = " ".join(row["document"].split())
        assert flat.count(row["summary"]) == 1
        places.append(flat.index(row["summary"]) / len(flat))
    assert min(places) < 0.25
    assert max(places) > 0.75
    assert len({row["id"] for row in rows}) == len(rows)


def test_signatures_say_their_parameters(library: Path) -> None:
    rows = signature_rows(definitions(library), 20, seed=0)
    assert rows == signature_rows(definitions(library), 20, seed=0)
    assert {row["json"] for row in rows if "undocumented" in str(row["id"])} == {
        '{"name": "undocumented", "parameters": ["a", "b"]}'
    }


def test_too_few_sources_are_an_error(library: Path) -> None:
    with pytest.raises(AssertionError, match="of 999"):
        signature_rows(definitions(library), 999, seed=0)


def test_the_committed_choices_are_made_again_to_the_byte(tmp_path: Path) -> None:
    write(tmp_path / "choices.jsonl", choice_rows(read_pairs(PAIRS), seed=0))
    assert (tmp_path / "choices.jsonl").read_bytes() == (EVAL / "data" / "docstring-choices.jsonl").read_bytes()
    rows, pairs = rows_of("docstring-choices.jsonl"), read_pairs(PAIRS)
    assert [row["choices"][row["answer"]] for row in rows] == [pair.summary for pair in pairs]
    right = [row["answer"] for row in rows]
    assert all(100 < right.count(place) < 150 for place in range(4))


def test_the_committed_mixed_lengths_are_made_again_to_the_byte(tmp_path: Path) -> None:
    write(tmp_path / "mixed.jsonl", mixed_rows(read_pairs(PAIRS), NUM_MIXED))
    assert (tmp_path / "mixed.jsonl").read_bytes() == (EVAL / "data" / "docstrings-smoke.jsonl").read_bytes()
    lengths = [len(row["document"]) for row in rows_of("docstrings-smoke.jsonl")]
    assert min(lengths[EVERY - 1 :: EVERY]) > 2 * max(lengths[::EVERY])


def test_the_committed_long_documents_are_long() -> None:
    check_long_documents(rows_of("long-documents.jsonl"))


@pytest.mark.parametrize("suite", ["json", "json-structured"])
def test_the_committed_answers_follow_the_schema(suite: str) -> None:
    content = yaml.safe_load((EVAL / "suites" / f"{suite}.yaml").read_text())
    for row in rows_of("signatures.jsonl"):
        jsonschema.validate(json.loads(row["json"]), content["json_schema"])


def test_both_json_suites_ask_the_same() -> None:
    """So that they share their baselines."""
    one, other = (
        yaml.safe_load((EVAL / "suites" / f"{name}.yaml").read_text()) for name in ("json", "json-structured")
    )
    for key in ("data", "columns", "messages", "max_tokens", "json_schema", "num_samples"):
        assert one[key] == other[key]
