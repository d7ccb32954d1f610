"""A receipt of a served answer, on request: everything needed to compute it again, and the answer itself.

llmserve's engines return the same tokens for the same request, whatever else they do, so anyone with the engine can
check a receipt (`llmserve verify`). The receipt alone proves nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from llmserve.core import FinishReason, GenerateRequest, SamplingParams
from llmserve.engine.base import EngineInfo
from llmserve.errors import InvalidArgument, raise_problems
from llmserve.stages.guides import GuideKind, GuideText

FORMAT = 1
ENGINE_FIELDS = ("name", "digest", "target", "kernels")
SAMPLING_FIELDS: Mapping[str, type] = {field.name: type(field.default) for field in fields(SamplingParams)}
CUT_OFF = (FinishReason.CANCELLED, FinishReason.TIMED_OUT)  # by the clock or the client: the engine would have gone on


@dataclass(frozen=True, slots=True)
class AskedTokens:
    """The request to an engine, with guide and stop strings as text."""

    generate: GenerateRequest
    guide: GuideText | None = None
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Receipt:
    """The receipt of one answer."""

    engine: Mapping[str, str]  # ENGINE_FIELDS
    asked: AskedTokens
    sequence_index: int
    output_ids: tuple[int, ...]
    tail_text: str  # after the ids: the part of a token before a stop string
    finish_reason: FinishReason

    @classmethod
    def of(
        cls,
        engine: EngineInfo,
        asked: AskedTokens,
        sequence_index: int,
        output_ids: Sequence[int],
        tail_text: str,
        finish_reason: FinishReason,
    ) -> Receipt:
        stamp = {name: str(getattr(engine, name)) for name in ENGINE_FIELDS}
        return cls(stamp, asked, sequence_index, tuple(output_ids), tail_text, finish_reason)

    @property
    def is_cut_off(self) -> bool:
        return self.finish_reason in CUT_OFF

    def document(self) -> dict[str, Any]:
        """As JSON."""
        request, guide = self.asked.generate, self.asked.guide
        return {
            "format": FORMAT,
            "engine": dict(self.engine),
            **({"adapter": request.adapter} if request.adapter else {}),
            "prompt_ids": list(request.prompt_ids),
            "sampling": asdict(request.sampling),
            "end_id": request.end_id,
            "stop_ids": [list(ids) for ids in request.stop_ids],
            "stop_strings": list(self.asked.stop_strings),
            "bad_ids": [list(ids) for ids in request.bad_ids],
            "embedding_bias": [[token, bias] for token, bias in request.embedding_bias],
            "guide": {"kind": guide.kind.value, "text": guide.text} if guide is not None else None,
            "num_sequences": request.num_sequences,
            "sequence_index": self.sequence_index,
            "output_ids": list(self.output_ids),
            "tail_text": self.tail_text,
            "finish_reason": self.finish_reason.value,
        }

    def text(self) -> str:
        return json.dumps(self.document(), ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def read(cls, document: object) -> Receipt:
        """`InvalidArgument` lists all problems."""
        content = document if isinstance(document, dict) else {}
        if content.get("format") != FORMAT:
            raise InvalidArgument(f"not a receipt of format {FORMAT}: its format is {content.get('format')!r}")
        reader = _ReceiptReader(content)
        sampling = reader.sampling()
        guide = reader.guide()
        request = GenerateRequest(
            "receipt",
            tuple(reader.ids("prompt_ids")),
            sampling,
            end_id=reader.optional("end_id", int),
            stop_ids=reader.id_lists("stop_ids"),
            bad_ids=reader.id_lists("bad_ids"),
            embedding_bias=reader.bias(),
            num_sequences=reader.value("num_sequences", int, 1),
            adapter=reader.optional("adapter", str) or "",
        )
        engine = reader.value("engine", dict, {})
        reader.expect(
            all(isinstance(engine.get(name), str) for name in ENGINE_FIELDS),
            f"engine must have {', '.join(ENGINE_FIELDS)} as strings",
        )
        index = reader.value("sequence_index", int, 0)
        reader.expect(
            0 <= index < request.num_sequences, f"sequence_index {index} must be below {request.num_sequences}"
        )
        reason = reader.value("finish_reason", str, "")
        reasons = {each.value: each for each in FinishReason}
        reader.expect(reason in reasons, f"finish_reason must be one of {', '.join(reasons)}, got {reason!r}")
        strings = reader.value("stop_strings", list, [])
        reader.expect(all(isinstance(text, str) for text in strings), "stop_strings must be strings")
        output_ids, tail_text = reader.ids("output_ids"), reader.value("tail_text", str, "")
        raise_problems(InvalidArgument, "it is not a receipt of llmserve", reader.problems)
        asked = AskedTokens(request, guide, tuple(strings))
        return cls(engine, asked, index, tuple(output_ids), tail_text, reasons[reason])


class _ReceiptReader:
    """Typed access to a receipt's fields, collecting problems."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content
        self.problems: list[str] = []

    def expect(self, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(problem)

    def value(self, name: str, kind: type, default: Any) -> Any:
        value = self._content.get(name)
        if _is(value, kind):
            return value
        self.problems.append(f"{name} must be {_words(kind)}, got {_shown(value)}")
        return default

    def optional(self, name: str, kind: type) -> Any:
        return None if self._content.get(name) is None else self.value(name, kind, None)

    def ids(self, name: str) -> list[int]:
        return self._items(name, _is_id, "token ids")

    def id_lists(self, name: str) -> tuple[tuple[int, ...], ...]:
        found = self._items(name, lambda item: isinstance(item, list) and all(map(_is_id, item)), "lists of token ids")
        return tuple(tuple(item) for item in found)

    def bias(self) -> tuple[tuple[int, float], ...]:
        def is_pair(item: object) -> bool:
            return isinstance(item, list) and len(item) == 2 and _is_id(item[0]) and _is(item[1], float)

        return tuple((token, float(bias)) for token, bias in self._items("embedding_bias", is_pair, "[id, bias] pairs"))

    def sampling(self) -> SamplingParams:
        given = self.value("sampling", dict, {})
        wrong = [name for name, kind in SAMPLING_FIELDS.items() if not _is(given.get(name), kind)]
        unknown = sorted(map(str, set(given) - set(SAMPLING_FIELDS)))
        self.problems += [f"sampling.{name} must be {_words(SAMPLING_FIELDS[name])}" for name in wrong]
        self.problems += [f"sampling.{name} is unknown" for name in unknown]
        if wrong or unknown:
            return SamplingParams()
        found = SamplingParams(**{name: SAMPLING_FIELDS[name](value) for name, value in given.items()})
        self.problems += found.problems()
        return found

    def guide(self) -> GuideText | None:
        given = self.optional("guide", dict)
        if given is None:
            return None
        kinds = {kind.value: kind for kind in GuideKind}
        if given.get("kind") in kinds and isinstance(given.get("text"), str):
            return GuideText(kinds[given["kind"]], given["text"])
        self.problems.append(f"guide must have a text and a kind, one of {', '.join(kinds)}")
        return None

    def _items(self, name: str, fits: Callable[[object], bool], words: str) -> list[Any]:
        found: list[Any] = self.value(name, list, [])
        if all(map(fits, found)):
            return found
        self.problems.append(f"{name} must be {words}")
        return []


def _is(value: object, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)


def _is_id(value: object) -> bool:
    return _is(value, int)


def _words(kind: type) -> str:
    return {int: "an integer", float: "a number", str: "a string", list: "a list", dict: "an object"}[kind]


def _shown(value: object) -> str:
    return repr(value)[:40]
