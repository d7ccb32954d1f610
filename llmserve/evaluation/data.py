"""Reads a suite's rows as samples: from a local file, or from the hub through `datasets` (imported only here)."""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from llmserve.errors import InvalidArgument, Unavailable, Unsupported, raise_problems
from llmserve.evaluation.answers import Sample
from llmserve.evaluation.suite import DataSource, Suite, require_file
from llmserve.stages.chat import Message

Row = Mapping[str, Any]
CountIds = Callable[[str | tuple[Message, ...]], int]  # prompt -> number of its token ids


def load_samples(suite: Suite, num_samples: int, count_ids: CountIds) -> list[Sample]:
    """The suite's first `num_samples` rows as samples. Raises if there are fewer, or if a column is missing."""
    rows = list(islice(_load_rows(suite.data), num_samples))
    problems = _row_problems(suite, rows)
    if len(rows) < num_samples:
        problems.append(f"{num_samples} samples are requested, but the data has {len(rows)}")
    raise_problems(InvalidArgument, f"the data of suite {suite.name}", problems)
    return [_sample(suite, index, row, count_ids) for index, row in enumerate(rows)]


def suite_digest(suite: Suite) -> str:
    """SHA-256 (hex) of what affects answers: data, prompt and lengths, but not margins or the number of samples."""
    parts = [suite.data.identity(), suite.prompt_parts, suite.max_tokens, suite.max_input_tokens]
    parts += [suite.choices_column] if suite.choices_column else []
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _load_rows(source: DataSource) -> Iterable[Row]:
    if source.path is not None:
        return _load_file(source.path)
    try:
        import datasets
    except ImportError as error:
        raise Unsupported("data sets of the hub need the datasets package: pip install 'llmserve[eval]'") from error
    datasets.disable_progress_bars()
    try:
        rows: Iterable[Row] = datasets.load_dataset(
            source.hub, source.config, split=source.split, revision=source.revision
        )
    except Exception as error:  # a border: the package raises a dozen kinds, the cause is almost always the network
        raise Unavailable(
            f"dataset {source.hub} cannot be loaded from the Hugging Face hub ({error}); a network or a copy "
            "in the local cache is required. Or give --suite FILE with a local file as data.path (docs/eval.md)"
        ) from error
    return rows


def _load_file(path: Path) -> list[Row]:
    """Every row has every column; missing values are None."""
    require_file(path)
    try:
        rows = READERS[path.suffix](path)
    except (ValueError, RecursionError, OSError, csv.Error) as error:
        raise InvalidArgument(f"{path} cannot be read as {path.suffix[1:]}: {error}") from error
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in columns} for row in rows]


def _read_json(path: Path) -> list[Row]:
    """A list of objects, or one object per line."""
    text = path.read_text(encoding="utf-8-sig")
    numbered: Iterable[tuple[int, Any]] = (
        enumerate(json.loads(text), 1)
        if text.lstrip().startswith("[")
        else ((number, _in_line(number, line)) for number, line in enumerate(text.split("\n"), 1) if line.strip())
    )
    rows: list[Row] = []
    for number, row in numbered:
        if not isinstance(row, dict):
            raise ValueError(f"row {number} is not an object")
        rows.append(row)
    return rows


def _in_line(number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from error


def _read_csv(path: Path) -> list[Row]:
    csv.field_size_limit(sys.maxsize)  # of a document
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        rows: list[Row] = []
        for row in reader:
            if None in row:
                raise ValueError(f"the row that ends in line {reader.line_num} has more cells than the header")
            rows.append(row)
    return rows


def _read_parquet(path: Path) -> list[Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise Unsupported("parquet files need the pyarrow package: pip install 'llmserve[eval]'") from error
    try:
        rows: list[Row] = parquet.read_table(path).to_pylist()
    except ArrowException as error:  # some are other built-in errors, for example if a codec is missing
        raise ValueError(error) from error
    return rows


READERS: Mapping[str, Callable[[Path], list[Row]]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _row_problems(suite: Suite, rows: list[Row]) -> list[str]:
    optional = [name for name in (suite.id_column, suite.choices_column) if name]
    wanted = [*suite.prompt_columns, suite.reference_column, *optional]
    present = rows[0].keys() if rows else wanted
    problems = [f"no column {name!r}; the columns are {', '.join(present)}" for name in wanted if name not in present]
    if problems:
        return problems
    if suite.choices_column:
        return [f"row {i} {problem}" for i, row in enumerate(rows) if (problem := _choice_problem(suite, row))][:10]
    problems = [_reference_problem(row[suite.reference_column]) for row in rows]
    return [f"row {index} {problem}" for index, problem in enumerate(problems) if problem][:10]


def _reference_problem(reference: Any) -> str:
    """A number counts as a text; 0 is one."""
    if isinstance(reference, list | dict):
        return f"must have one text as its reference, got {reference!r:.60}"
    return "" if reference is not None and str(reference).strip() else "has no reference text"


def _choice_problem(suite: Suite, row: Row) -> str:
    choices = row[suite.choices_column or ""]
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c.strip() for c in choices):
        return f"must have a list of at least two texts in {suite.choices_column!r}"
    if len(set(choices)) < len(choices):
        return "lists the same choice twice"
    right = row[suite.reference_column]
    return "" if _right_choice(choices, right) else f"has no choice {right!r}; give its text, or its number from 0 on"


def _right_choice(choices: Sequence[str], right: Any) -> str:
    """Find it by its text or its number; empty if not found."""
    text = str(right)
    if not isinstance(right, int) and text in choices:
        return text
    return choices[int(text)] if text.isdecimal() and int(text) < len(choices) else ""


def _sample(suite: Suite, index: int, row: Row, count_ids: CountIds) -> Sample:
    texts = {name: "" if row[name] is None else str(row[name]) for name in suite.prompt_columns}
    prompt = _fill(suite, texts)
    if suite.max_input_tokens is not None:
        prompt = _cut_to_fit(suite, texts, count_ids)
    sample_id = str(row[suite.id_column]) if suite.id_column else str(index)
    if suite.choices_column:
        choices = tuple(row[suite.choices_column])
        return Sample(sample_id, prompt, _right_choice(choices, row[suite.reference_column]), choices)
    return Sample(sample_id, prompt, str(row[suite.reference_column]))


def _fill(suite: Suite, texts: Mapping[str, str]) -> str | tuple[Message, ...]:
    if isinstance(suite.prompt, str):
        return suite.prompt.format_map(texts)
    return tuple(Message(message.role, message.content.format_map(texts)) for message in suite.prompt)


def _cut_to_fit(suite: Suite, texts: Mapping[str, str], count_ids: CountIds) -> str | tuple[Message, ...]:
    """Shorten the longest text at its end until the prompt has at most `max_input_tokens` ids."""
    assert suite.max_input_tokens is not None
    longest = max(texts, key=lambda name: len(texts[name]))
    kept = texts[longest]
    prompt = _fill(suite, texts)
    while kept and (count := count_ids(prompt)) > suite.max_input_tokens:
        # proportionally, and at least one character, so that it ends
        kept = kept[: min(len(kept) - 1, len(kept) * suite.max_input_tokens // count)]
        prompt = _fill(suite, {**texts, longest: kept})
    return prompt
