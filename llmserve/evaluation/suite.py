"""A suite file (YAML): which data, which prompt, how much the engine may lose.

name: docstrings
data: {path: ../data/docstrings.jsonl}      # .jsonl, .json, .csv or .parquet, relative to the suite file
      # or {hub: owner/name, config: ..., split: test, revision: ...}
columns: {reference: summary, id: id}       # `id` is optional; with `choices: COLUMN` the suite is multiple choice
prompt: "{document} TL;DR: "                # text; {column} is replaced by the row's value
messages: [{role: user, content: "..."}]    # or chat messages, in the checkpoint's own chat format
num_samples: 500                            # the first so many rows
max_tokens: 32                              # of the answer, greedy on both sides; none in multiple choice
max_input_tokens: 923                       # optional: the longest column is cut so that the prompt fits
metrics: [rougeL, chrf]                     # to report; default: ROUGE, and those that are judged
stemming: true                              # of ROUGE
json_schema: {type: object}                 # of json_valid; default: any JSON
structured_output: true                     # the engine is held to that schema, the baseline never; default: false
margins: {rougeL: 0.3}                      # points (of 100) that the engine may lose
loss_margins: {float: {kl: 0.001, flip: 0.1}, int8: {kl: 0.01}}   # see evidence.py; float: engines without quantization
rounding_margins: {float: 4, int8: 1}       # times what sound rounding costs the network (rounding.py), for KL
evidence: required                          # or optional: an engine that tells none is judged by the rest
as_served: optional                         # or required: also of engines that promise no bits, and never left out
speed_margins: {ttft: 1.2, throughput: 1.1} # how many times worse than the last record; see served/measures.py
floors: {rougeL: 15}                        # what it must reach whatever the baseline does; margins, floors or both
inconclusive: fail                          # or pass: what the exit code says when the samples cannot tell
baselines: ../baselines                     # folder of stored Hugging Face outputs, relative to the suite file
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmserve.errors import InvalidArgument, NotFound, raise_problems
from llmserve.evaluation.choices import CHOICE_METRICS
from llmserve.evaluation.judging.evidence import LOSSES
from llmserve.evaluation.judging.text_metrics import DEFAULT_METRICS, TEXT_METRICS, TextRules, schema_problem
from llmserve.evaluation.served.measures import MEASURES
from llmserve.models.config import is_number
from llmserve.models.number_formats import WEIGHTS
from llmserve.stages.chat import Message
from llmserve.stages.guides import GuideKind, GuideText
from llmserve.strict_yaml import read_yaml

LOCAL_FORMATS = (".jsonl", ".json", ".csv", ".parquet")
REQUIRED = ("name", "data", "columns", "num_samples", "max_tokens")
OPTIONAL_OF_TEXTS = (
    "stemming", "json_schema", "structured_output", "loss_margins", "rounding_margins", "evidence",
)  # fmt: skip
OF_TEXTS = ("max_tokens", *OPTIONAL_OF_TEXTS)
OPTIONAL = (
    *OPTIONAL_OF_TEXTS, "prompt", "messages", "max_input_tokens", "metrics", "margins", "as_served", "speed_margins",
    "floors", "inconclusive", "baselines",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DataSource:
    """A local file, or a dataset of the hub; exactly one of `path` and `hub` is set."""

    path: Path | None = None
    hub: str = ""
    config: str | None = None
    split: str = "test"
    revision: str | None = None

    def identity(self) -> list[str | None]:
        """The SHA-256 of a local file, or a hub dataset's name, config, split and revision."""
        if self.path is None:
            return [self.hub, self.config, self.split, self.revision]
        require_file(self.path)
        return [hashlib.sha256(self.path.read_bytes()).hexdigest()]


def require_file(path: Path) -> None:
    if not path.is_file():
        raise NotFound(f"data file {path} does not exist; the suite's data.path is relative to the suite file")


@dataclass(frozen=True, slots=True)
class Suite:
    name: str
    data: DataSource
    reference_column: str
    id_column: str | None
    prompt: str | tuple[Message, ...]
    num_samples: int
    max_tokens: int
    baselines: Path
    max_input_tokens: int | None = None
    choices_column: str | None = None  # None: answers are generated, not chosen
    metrics: tuple[str, ...] = DEFAULT_METRICS  # to report, in the order of the tables
    stemming: bool = True
    json_schema: Mapping[str, Any] | None = None
    structured_output: bool = False
    margins: Mapping[str, float] = field(default_factory=dict)
    loss_margins: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # precision -> loss -> limit
    rounding_margins: Mapping[str, float] = field(default_factory=dict)  # precision -> multiple of the cost of rounding
    needs_evidence: bool = True
    needs_served: bool = False  # judged as served, whatever the engine promises
    speed_margins: Mapping[str, float] = field(default_factory=dict)  # measure -> limit of times worse
    floors: Mapping[str, float] = field(default_factory=dict)
    inconclusive_passes: bool = False

    def rules(self) -> dict[str, Any]:
        """Everything that determines the verdict, for JSON. Raises `NotFound` if the data file is missing."""
        return {
            "data": self.data.identity(),
            "columns": {"reference": self.reference_column, "choices": self.choices_column},
            "prompt": self.prompt_parts,
            "max_tokens": self.max_tokens,
            "max_input_tokens": self.max_input_tokens,
            "margins": dict(self.margins),
            "loss_margins": {precision: dict(margins) for precision, margins in self.loss_margins.items()},
            "evidence": "required" if self.needs_evidence else "optional",
            "floors": dict(self.floors),
            "num_samples": self.num_samples,
            "stemming": self.stemming,
            "inconclusive": "pass" if self.inconclusive_passes else "fail",
        } | self._rules_of_few()

    def _rules_of_few(self) -> dict[str, Any]:
        """Only rules that are set: earlier blessings of suites without them have no such lines."""
        found: dict[str, Any] = {"json_schema": dict(self.json_schema)} if self.json_schema is not None else {}
        found |= {"structured_output": True} if self.structured_output else {}
        found |= {"rounding_margins": dict(self.rounding_margins)} if self.rounding_margins else {}
        found |= {"as_served": "required"} if self.needs_served else {}
        return found | ({"speed_margins": dict(self.speed_margins)} if self.speed_margins else {})

    @property
    def prompt_parts(self) -> str | list[list[str]]:
        """The prompt as JSON holds it."""
        return self.prompt if isinstance(self.prompt, str) else [[m.role, m.content] for m in self.prompt]

    @property
    def is_plain(self) -> bool:
        """Whether answers are free text that depends only on the prompt; the engine as served is asked these."""
        return not self.choices_column and not self.structured_output

    @property
    def text_rules(self) -> TextRules:
        return TextRules(self.stemming, self.json_schema)

    @property
    def guide(self) -> GuideText | None:
        """The required format of the engine's answers."""
        if not self.structured_output:
            return None
        if self.json_schema is None:
            return GuideText(GuideKind.JSON)
        return GuideText(GuideKind.JSON_SCHEMA, json.dumps(self.json_schema))

    @property
    def prompt_columns(self) -> list[str]:
        """Columns that the prompt refers to, each once, in order."""
        texts = [self.prompt] if isinstance(self.prompt, str) else [message.content for message in self.prompt]
        return list(dict.fromkeys(name for text in texts for name in _fields(text)))


def load_suite(path: Path) -> Suite:
    """Raises one `InvalidArgument` listing everything wrong with the file, or `NotFound`."""
    if not path.is_file():
        raise NotFound(f"no suite file {path}; give one with --suite. The project's own are in eval/suites")
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidArgument(f"suite {path} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise InvalidArgument(f"suite {path} must be a mapping with the keys {', '.join(REQUIRED)}")
    reader = _SuiteReader(content, path.parent)
    suite = reader.read()
    raise_problems(InvalidArgument, f"suite {path}", reader.problems)
    return suite


class _SuiteReader:
    """Reads every key, collects problems, and returns a suite that is only valid without problems."""

    def __init__(self, content: dict[Any, Any], folder: Path) -> None:
        self._content = content
        self._folder = folder
        self._choices: str | None = None  # the column of that name
        self.problems: list[str] = []

    def read(self) -> Suite:
        columns = self._mapping("columns", {"reference", "id", "choices"})
        self._choices = columns.get("choices")
        if not isinstance(self._choices, str | None):
            self.problems.append("columns.choices must name the column with the list of choices")
        required = [key for key in REQUIRED if not self._choices or key not in OF_TEXTS]
        self.problems += [f"missing key: {key}" for key in required if key not in self._content]
        if self._choices:
            self.problems += [f"{key} has no effect with columns.choices" for key in OF_TEXTS if key in self._content]
        if "columns" in self._content and not isinstance(columns.get("reference"), str):
            self.problems.append("columns.reference must name the column with the expected text")
        suite = Suite(
            name=self._typed("name", str, ""),
            data=self._data(),
            reference_column=str(columns.get("reference", "")),
            id_column=columns.get("id"),
            prompt=self._prompt(),
            num_samples=self._count("num_samples"),
            max_tokens=self._count("max_tokens"),
            baselines=self._folder / self._typed("baselines", str, "../baselines"),
            max_input_tokens=self._count("max_input_tokens") if "max_input_tokens" in self._content else None,
            choices_column=self._choices,
            metrics=self._metrics(),
            stemming=self._typed("stemming", bool, True),
            json_schema=self._json_schema(),
            structured_output=self._typed("structured_output", bool, False),
            margins=self._points("margins"),
            loss_margins=self._loss_margins(),
            rounding_margins=self._times("rounding_margins", {format.precision for format in WEIGHTS.values()}),
            needs_evidence=self._choice("evidence", ("required", "optional")) == "required",
            needs_served=self._choice("as_served", ("optional", "required")) == "required",
            speed_margins=self._times("speed_margins", set(MEASURES)),
            floors=self._points("floors"),
            inconclusive_passes=self._choice("inconclusive", ("fail", "pass")) == "pass",
        )
        if not any(self._content.get(key) for key in ("margins", "loss_margins", "rounding_margins", "floors")):
            self.problems.append("the suite has no criterion; give margins, loss_margins, rounding_margins or floors")
        if "/" in suite.name or suite.name.startswith("."):
            self.problems.append(f"name must not contain '/' or begin with '.', as it names reports: {suite.name!r}")
        if not suite.is_plain and (suite.needs_served or suite.speed_margins):
            self.problems.append(
                "as_served and speed_margins need free text; leave them out with columns.choices and structured_output"
            )
        self._reject_unknown(self._content, {*REQUIRED, *OPTIONAL}, "")
        return suite

    def _reject_unknown(self, content: Mapping[Any, Any], known: set[str], prefix: str) -> None:
        self.problems += [
            f"unknown key: {prefix}{key} (known: {', '.join(sorted(known))})" for key in content if key not in known
        ]

    def _typed(self, key: str, kind: type, default: Any) -> Any:
        value = self._content.get(key, default)
        if not isinstance(value, kind):
            self.problems.append(f"{key} must be a {kind.__name__}, got {value!r}")
            return default
        return value

    def _count(self, key: str) -> int:
        value = self._content.get(key, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.problems.append(f"{key} must be an integer of at least 1, got {value!r}")
            return 1
        return value

    def _mapping(self, key: str, known: set[str]) -> Mapping[str, Any]:
        value: Mapping[str, Any] = self._typed(key, dict, {})
        self._reject_unknown(value, known, f"{key}.")
        return value

    @property
    def _known_metrics(self) -> tuple[str, ...]:
        return CHOICE_METRICS if self._choices else tuple(TEXT_METRICS)

    def _metrics(self) -> tuple[str, ...]:
        """Requested metrics, or else the usual ones; and those that are judged."""
        wanted = self._typed("metrics", list, list(CHOICE_METRICS if self._choices else DEFAULT_METRICS))
        known = self._known_metrics
        self.problems += [f"unknown metric: {name} (known: {', '.join(known)})" for name in wanted if name not in known]
        if not wanted:
            self.problems.append("metrics must name at least one; leave it out for the usual ones")
        judged = [self._content.get(key) for key in ("margins", "floors")]
        asked = [*wanted, *(name for points in judged if isinstance(points, dict) for name in points)]
        return tuple(name for name in known if name in asked)

    def _json_schema(self) -> Mapping[str, Any] | None:
        if "json_schema" not in self._content:
            return None
        schema: Mapping[str, Any] = self._typed("json_schema", dict, {})
        if problem := schema_problem(schema):
            self.problems.append(f"json_schema is not a JSON schema: {problem}")
        return schema

    def _points(self, key: str) -> dict[str, float]:
        points = self._mapping(key, set(self._known_metrics))
        bad = [name for name, value in points.items() if not is_number(value) or not 0 <= value <= 100]
        self.problems += [f"{key}.{name} must be a number from 0 to 100, got {points[name]!r}" for name in bad]
        return {name: float(value) for name, value in points.items() if name not in bad}

    def _loss_margins(self) -> dict[str, dict[str, float]]:
        found, precisions = {}, {format.precision for format in WEIGHTS.values()}
        for precision, margins in self._mapping("loss_margins", precisions).items():
            key = f"loss_margins.{precision}"
            if not isinstance(margins, dict):
                self.problems.append(f"{key} must be a mapping of losses, got {margins!r}")
                continue
            self._reject_unknown(margins, set(LOSSES), f"{key}.")
            bad = [name for name, value in margins.items() if not is_number(value) or value < 0]
            self.problems += [f"{key}.{name} must be a number of at least 0, got {margins[name]!r}" for name in bad]
            found[precision] = {name: float(value) for name, value in margins.items() if name not in bad}
        return found

    def _times(self, key: str, known: set[str]) -> dict[str, float]:
        margins = self._mapping(key, known)
        bad = [name for name, value in margins.items() if not is_number(value) or value < 1]
        self.problems += [f"{key}.{name} must be a number of at least 1, got {margins[name]!r}" for name in bad]
        return {name: float(value) for name, value in margins.items() if name not in bad}

    def _data(self) -> DataSource:
        data = self._mapping("data", {"path", "hub", "config", "split", "revision"})
        self.problems += [
            f"data.{k} must be text, got {v!r} (put it in quotes)" for k, v in data.items() if not isinstance(v, str)
        ]
        if "data" in self._content and ("path" in data) == ("hub" in data):
            self.problems.append("data needs either path (a local file) or hub (a dataset of the Hugging Face hub)")
        if "hub" in data:
            return DataSource(None, data["hub"], data.get("config"), data.get("split", "test"), data.get("revision"))
        path = self._folder / str(data.get("path", ""))
        if "path" in data and path.suffix not in LOCAL_FORMATS:
            self.problems.append(f"data.path must end in {', '.join(LOCAL_FORMATS)}, got {path.name}")
        return DataSource(path)

    def _prompt(self) -> str | tuple[Message, ...]:
        if ("prompt" in self._content) == ("messages" in self._content):
            self.problems.append("give either prompt (text) or messages (chat)")
            return ""
        prompt = self._typed("prompt", str, "") if "prompt" in self._content else self._messages()
        texts = [prompt] if isinstance(prompt, str) else [message.content for message in prompt]
        self.problems += [problem for text in texts if (problem := _template_problem(text))]
        if not self.problems and not any(_fields(text) for text in texts):
            self.problems.append("the prompt names no column of the data; write {column} where the row's text belongs")
        return prompt

    def _messages(self) -> tuple[Message, ...]:
        messages: Sequence[Any] = self._typed("messages", list, [])
        good = [
            m for m in messages
            if isinstance(m, dict) and m.keys() == {"role", "content"} and all(isinstance(v, str) for v in m.values())
        ]  # fmt: skip
        if len(good) != len(messages) or not messages:
            self.problems.append("messages must be a list of {role: ..., content: ...} with texts")
        return tuple(Message(m["role"], m["content"]) for m in good)

    def _choice(self, key: str, words: tuple[str, str]) -> str:
        """The first word is the default."""
        value: str = self._typed(key, str, words[0])
        if value not in words:
            self.problems.append(f"{key} must be {' or '.join(words)}, got {value!r}")
        return value


def _fields(template: str) -> list[str]:
    return [name for _, name, _, _ in string.Formatter().parse(template) if name]


def _template_problem(template: str) -> str:
    """Only plain {column} is allowed: no attributes, indices or format codes."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        return f"the prompt template {template!r} is malformed: {error} (write {{{{ for a literal brace)"
    odd = [
        name
        for _, name, code, conversion in parts
        if name is not None and (not name.isidentifier() or code or conversion)
    ]
    return f"the prompt template may only refer to columns as {{column}}, found {odd[0]!r}" if odd else ""
