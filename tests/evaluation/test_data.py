from __future__ import annotations

import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmserve.errors import InvalidArgument, NotFound, Unavailable
from llmserve.evaluation.answers import Sample
from llmserve.evaluation.data import load_samples, suite_digest
from llmserve.evaluation.prompts import PromptEncoder
from llmserve.evaluation.suite import load_suite
from llmserve.stages.chat import Message
from tests.checkpoints import make_checkpoint
from tests.evaluation.suites import ROWS, write_choice_suite, write_suite

FIRST = Sample("row-0", (Message("user", f"Summarize:\n{ROWS[0]['document']}"),), ROWS[0]["summary"])


def count_words(prompt: str | tuple[Message, ...]) -> int:
    assert isinstance(prompt, str)
    return len(prompt.split())


def write_rows(folder: Path, name: str) -> None:
    path = folder / name
    if path.suffix == ".json":
        path.write_text(json.dumps(ROWS))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ROWS[0].keys())
            writer.writeheader()
            writer.writerows(ROWS)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet"])
def test_local_files_load_offline(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    suite = load_suite(write_suite(tmp_path, data={"path": name}))
    write_rows(tmp_path, name)
    samples = load_samples(suite, len(ROWS), count_words)
    assert samples[0] == FIRST
    assert [sample.id for sample in samples] == [row["id"] for row in ROWS]
    assert len(load_samples(suite, 3, count_words)) == 3


def test_text_prompts_and_row_numbers(tmp_path: Path) -> None:
    path = write_suite(tmp_path, messages=None, prompt="{document} TL;DR: ", columns={"reference": "summary"})
    sample = load_samples(load_suite(path), 2, count_words)[1]
    assert sample == Sample("1", ROWS[1]["document"] + " TL;DR: ", ROWS[1]["summary"])


def test_long_documents_are_cut_at_their_end(tmp_path: Path) -> None:
    path = write_suite(tmp_path, messages=None, prompt="Task: {document} TL;DR:", max_input_tokens=6)
    prompt = load_samples(load_suite(path), 1, count_words)[0].prompt
    assert isinstance(prompt, str)
    assert count_words(prompt) <= 6
    assert prompt.startswith("Task: the file")
    assert prompt.endswith(" TL;DR:")


def test_documents_far_beyond_the_context_are_cut_too(tmp_path: Path) -> None:
    """The stage that makes ids refuses such a text before it looks at it."""
    encoder = PromptEncoder(make_checkpoint(tmp_path / "tiny", "llama", max_position_embeddings=64), 8)
    path = write_suite(tmp_path, messages=None, prompt="Task: {document} TL;DR:", max_input_tokens=40)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": "i", "document": "word " * 50_000, "summary": "s"}) + "\n")
    (sample,) = load_samples(load_suite(path), 1, encoder.count_ids)
    assert isinstance(sample.prompt, str)
    assert sample.prompt.endswith(" TL;DR:")
    assert 20 < len(encoder.encode(sample.prompt).input_ids) <= 40


def test_a_prompt_that_makes_no_ids_is_named(tmp_path: Path) -> None:
    encoder = PromptEncoder(make_checkpoint(tmp_path / "tiny", "qwen2"), 8)
    with pytest.raises(InvalidArgument, match="sample b: its prompt has no tokens"):
        encoder.encode_samples([Sample("a", "text", "r"), Sample("b", "", "r")])
    with pytest.raises(InvalidArgument, match="sample c: the prompt cannot be used: the text has lone surrogates"):
        encoder.encode_samples([Sample("c", "half \ud800", "r")])


def test_what_is_wrong_with_the_rows_is_said(tmp_path: Path) -> None:
    suite = load_suite(write_suite(tmp_path, columns={"id": "key", "reference": "title"}))
    with pytest.raises(InvalidArgument) as caught:
        load_samples(suite, 33, count_words)
    assert "no column 'title'" in str(caught.value)
    assert "no column 'key'" in str(caught.value)
    assert "33 samples are requested, but the data has 32" in str(caught.value)


@pytest.mark.parametrize(
    ("reference", "found"),
    [
        (0, "0"),
        (1.5, "1.5"),
        (" ", "row 0 has no reference text"),
        (None, "row 0 has no reference text"),
        (["a", "b"], r"row 0 must have one text as its reference, got \['a', 'b'\]"),
    ],
)
def test_a_reference_is_a_text_or_a_number(tmp_path: Path, reference: object, found: str) -> None:
    suite = load_suite(write_suite(tmp_path))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": "i", "document": "d", "summary": reference}) + "\n")
    if not found.startswith("row"):
        assert load_samples(suite, 1, count_words)[0].reference == found
        return
    with pytest.raises(InvalidArgument, match=found):
        load_samples(suite, 1, count_words)


def test_choices_are_texts_and_one_of_them_is_right(tmp_path: Path) -> None:
    suite = load_suite(write_choice_suite(tmp_path))
    samples = load_samples(suite, len(ROWS), count_words)
    assert [sample.reference for sample in samples] == [row["summary"] for row in ROWS]
    assert all(len(set(sample.choices)) == 4 for sample in samples)
    assert samples[6].choices.index(samples[6].reference) == 2


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"choices": ["a", "b"], "answer": "b"}, "b"),
        ({"choices": ["a", "b"], "answer": "1"}, "b"),
        ({"choices": ["1", "0"], "answer": 1}, "0"),  # a number is a place
        ({"choices": ["1", "0"], "answer": "1"}, "1"),  # a text is a text
        ({"choices": ["a", "b"], "answer": 2}, "row 0 has no choice 2; give its text, or its number from 0 on"),
        ({"choices": ["a", "b"], "answer": -1}, "row 0 has no choice -1"),
        ({"choices": ["a", "b"], "answer": None}, "row 0 has no choice None"),
        ({"choices": ["a"], "answer": 0}, "row 0 must have a list of at least two texts in 'choices'"),
        ({"choices": ["a", " "], "answer": 0}, "row 0 must have a list of at least two texts"),
        ({"choices": "ab", "answer": 0}, "row 0 must have a list of at least two texts"),
        ({"choices": ["a", "a"], "answer": 0}, "row 0 lists the same choice twice"),
    ],
)
def test_the_right_choice_is_named_or_numbered(tmp_path: Path, row: dict[str, object], found: str) -> None:
    suite = load_suite(write_choice_suite(tmp_path))
    (tmp_path / "choices.jsonl").write_text(json.dumps(row | {"id": "i", "document": "d"}) + "\n")
    if not found.startswith("row"):
        assert load_samples(suite, 1, count_words)[0].reference == found
        return
    with pytest.raises(InvalidArgument, match=found):
        load_samples(suite, 1, count_words)


def test_a_missing_file(tmp_path: Path) -> None:
    suite = load_suite(write_suite(tmp_path, data={"path": "gone.jsonl"}))
    with pytest.raises(NotFound, match=r"gone\.jsonl"):
        load_samples(suite, 1, count_words)


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("rows.jsonl", b'{"id": "a"}\n{not json\n', "jsonl: line 2: Expecting property name"),
        ("rows.jsonl", b'{"id": "a"}\n\n7\n', "jsonl: row 3 is not an object"),
        ("rows.jsonl", b'{"id": "\xff"}\n', "jsonl: 'utf-8' codec can't decode"),
        ("rows.jsonl", b'{"id": ' + b"[" * 100_000, "jsonl: .*recursion"),
        ("rows.json", b'[{"id": "a"}, 7]', "json: row 2 is not an object"),
        ("rows.csv", b"id,document,summary\na,b,c,d\n", "csv: the row that ends in line 2 has more cells"),
        ("rows.csv", b'id,document,summary\na,b,"c', "csv: unexpected end of data"),
        ("rows.parquet", b"PAR1", "parquet: "),
    ],
)
def test_malformed_files_are_refused_by_line(tmp_path: Path, name: str, content: bytes, found: str) -> None:
    suite = load_suite(write_suite(tmp_path, data={"path": name}))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidArgument, match=f"cannot be read as {found}"):
        load_samples(suite, 1, count_words)


def test_a_parquet_file_that_pyarrow_does_not_know_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(path: Path) -> pa.Table:
        raise pa.ArrowNotImplementedError("codec LZO")

    suite = load_suite(write_suite(tmp_path, data={"path": "rows.parquet"}))
    write_rows(tmp_path, "rows.parquet")
    monkeypatch.setattr(pq, "read_table", unknown)
    with pytest.raises(InvalidArgument, match="cannot be read as parquet: codec LZO"):
        load_samples(suite, 1, count_words)


def test_texts_of_a_csv_file_stay_what_they_are(tmp_path: Path) -> None:
    """Neither a number nor a missing value, and as long as a document may be."""
    suite = load_suite(write_suite(tmp_path, data={"path": "rows.csv"}))
    long = "word " * 40_000
    (tmp_path / "rows.csv").write_text(f'\ufeffid,document,summary\n007,NA,1.50\n8,"{long}",null\n')
    samples = load_samples(suite, 2, count_words)
    assert [(sample.id, sample.reference) for sample in samples] == [("007", "1.50"), ("8", "null")]
    assert samples[0].prompt == (Message("user", "Summarize:\nNA"),)
    assert samples[1].prompt == (Message("user", f"Summarize:\n{long}"),)


def test_a_column_that_only_some_rows_have(tmp_path: Path) -> None:
    suite = load_suite(write_suite(tmp_path))
    (tmp_path / "rows.jsonl").write_text('{"summary": "s"}\n{"summary": "t", "document": "d", "id": "i"}\n')
    samples = load_samples(suite, 2, count_words)
    assert [sample.prompt for sample in samples] == [
        (Message("user", "Summarize:\n"),), (Message("user", "Summarize:\nd"),)
    ]  # fmt: skip


def test_empty_references_are_refused(tmp_path: Path) -> None:
    suite = load_suite(write_suite(tmp_path))
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(ROWS[1] | {"summary": " "}) + "\n")
    with pytest.raises(InvalidArgument, match="row 1 has no reference"):
        load_samples(suite, 2, count_words)


def test_a_hub_data_set_without_network_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def unreachable(*args: object, **options: object) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    suite = load_suite(write_suite(tmp_path, data={"hub": "nobody/nothing"}))
    with pytest.raises(Unavailable, match=r"nobody/nothing .*no route to host.*a network or a copy"):
        load_samples(suite, 1, count_words)


def test_digest_covers_what_answers_depend_on(tmp_path: Path) -> None:
    def digest(**changes: object) -> str:
        return suite_digest(load_suite(write_suite(tmp_path, **changes)))

    same = digest()
    assert digest(name="other", num_samples=3, margins={"rouge1": 9}, inconclusive="pass") == same
    assert digest(metrics=["chrf"], json_schema={}, structured_output=True) == same
    assert suite_digest(load_suite(write_choice_suite(tmp_path))) != same
    assert digest(max_tokens=9) != same
    assert digest(max_input_tokens=9) != same
    assert digest(messages=[{"role": "user", "content": "{document}"}]) != same
    with_path = load_suite(write_suite(tmp_path))
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    assert suite_digest(with_path) != same
