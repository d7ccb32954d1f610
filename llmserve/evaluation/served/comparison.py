"""Compares replies with those of the condition `alone`: token ids, log-probs and text, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llmserve.evaluation.judging.gate import Verdict
from llmserve.evaluation.judging.statistics import first_divergence
from llmserve.evaluation.served.replies import Question, ServedAnswer

GROUP = "as served"
MAX_NAMED = 3  # samples in a reason
NUM_SHOWN = 12  # characters of a text, from the difference on


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place at which an answer differs."""

    sample_id: str
    what: str  # token ids, log-probs, text; or the error
    position: int  # in tokens, or in characters of a text
    expected: str
    actual: str

    def __str__(self) -> str:
        if self.position < 0:
            return f"{self.sample_id} ({self.what}: {self.actual})"
        return f"{self.sample_id} ({self.what}, position {self.position}: {self.actual} instead of {self.expected})"


@dataclass(frozen=True, slots=True)
class ServedResult:
    """One condition, and its criteria. `verdict` is the gate's, if it is judged."""

    name: str
    num_answers: int
    differences: tuple[Difference, ...] = ()
    is_judged: bool = True  # false: only reported
    doubt: str = ""  # why it shows nothing although it should
    notes: tuple[str, ...] = field(default=())  # what really happened

    @property
    def group(self) -> str:
        return GROUP

    @property
    def verdict(self) -> Verdict:
        if self.differences:
            return Verdict.FAIL
        return Verdict.INCONCLUSIVE if self.doubt else Verdict.PASS

    @property
    def reason(self) -> str:
        """Why this verdict, as text."""
        if self.differences:
            named = ", ".join(map(str, self.differences[:MAX_NAMED]))
            more = f" and {len(self.differences) - MAX_NAMED} more" if len(self.differences) > MAX_NAMED else ""
            return f"{GROUP}, {self.name}: {len(self.differences)} of {self.num_answers} differ: {named}{more}"
        if self.doubt:
            return f"{GROUP}, {self.name}: {self.doubt}"
        return f"{GROUP}, {self.name}: {self.num_answers} answers are the same"

    def document(self) -> dict[str, Any]:
        """For the report, with every difference."""
        return {
            "answers": self.num_answers,
            "judged": self.is_judged,
            "verdict": self.verdict.value,
            "differences": [
                {
                    "id": d.sample_id, "what": d.what, "position": d.position, "expected": d.expected,
                    "actual": d.actual,
                }
                for d in self.differences
            ],
            "doubt": self.doubt,
            "notes": list(self.notes),
        }  # fmt: skip


def compared(
    name: str,
    questions: Sequence[Question],
    expected: Sequence[ServedAnswer],
    actual: Sequence[ServedAnswer],
    *,
    is_judged: bool,
    notes: Sequence[str] = (),
) -> ServedResult:
    """Compare question by question. What one side does not return is not compared."""
    pairs = zip(questions, expected, actual, strict=True)
    found = [difference(question.id, one, other) for question, one, other in pairs]
    differences = tuple(each for each in found if each is not None)
    return ServedResult(name, len(questions), differences, is_judged, notes=tuple(notes))


def difference(sample_id: str, expected: ServedAnswer, actual: ServedAnswer) -> Difference | None:
    """None if the replies are equal. A failed reply differs from everything."""
    for reply in (actual, expected):
        if reply.record.error:
            whose = "" if reply is actual else "when it was asked alone, "
            said = f"{whose}{reply.record.message or reply.record.error}"
            return Difference(sample_id, f"error {reply.record.error}", -1, "", said)
    for what, one, other in (
        ("token ids", expected.token_ids, actual.token_ids),
        ("log-probs", expected.log_probs, actual.log_probs),
    ):
        if one is not None and other is not None and (place := first_divergence(one, other)) is not None:
            return Difference(sample_id, what, place, _item(one, place), _item(other, place))
    if expected.has_thoughts != actual.has_thoughts:
        return None  # one API separates thoughts from the answer: those texts are not comparable
    if (place := first_divergence(expected.text, actual.text)) is None:
        return None
    return Difference(sample_id, "text", place, _part(expected.text, place), _part(actual.text, place))


def _item(values: Sequence[Any], place: int) -> str:
    return str(values[place]) if place < len(values) else "the end"


def _part(text: str, place: int) -> str:
    return repr(text[place : place + NUM_SHOWN]) if place < len(text) else "the end"
