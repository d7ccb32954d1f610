from __future__ import annotations

import pytest

from llmserve.benchmark.records import Record
from llmserve.evaluation.judging.gate import Verdict
from llmserve.evaluation.served.comparison import ServedResult, compared, difference
from llmserve.evaluation.served.conditions import most_at_once
from llmserve.evaluation.served.replies import Question, ServedAnswer
from llmserve.evaluation.served.seeds import judge_seeds

QUESTIONS = [Question(f"row-{i}", "text", 4) for i in range(4)]


def reply(text: str = "abcd", ids: list[int] | None = None, log_probs: list[float] | None = None) -> ServedAnswer:
    return ServedAnswer(Record(arrived=[1.0]), text, ids, log_probs)


def failed(kind: str = "INTERNAL", message: str = "no") -> ServedAnswer:
    found = ServedAnswer()
    found.record.fail(kind, message)
    return found


@pytest.mark.parametrize(
    ("expected", "actual", "what", "position"),
    [
        (reply(ids=[1, 2, 3]), reply(ids=[1, 5, 3]), "token ids", 1),
        (reply(ids=[1, 2, 3]), reply(ids=[1, 2]), "token ids", 2),
        (reply(ids=[1], log_probs=[-0.5]), reply(ids=[1], log_probs=[-0.5000001]), "log-probs", 0),
        (reply("abcd"), reply("abXd"), "text", 2),
        (reply("abcd", ids=[1]), reply("abc"), "text", 3),
        (reply(), failed(), "error INTERNAL", -1),
        (failed(), reply(), "error INTERNAL", -1),
    ],
)
def test_the_first_difference_is_named(expected: ServedAnswer, actual: ServedAnswer, what: str, position: int) -> None:
    found = difference("row-0", expected, actual)
    assert found is not None
    assert (found.sample_id, found.what, found.position) == ("row-0", what, position)


def test_what_one_side_does_not_tell_is_not_compared() -> None:
    assert difference("row-0", reply(ids=[1], log_probs=[-1.0]), reply()) is None
    thought = reply("a thought and an answer")
    thought.has_thoughts = True
    assert difference("row-0", reply(), thought) is None


def test_a_result_names_three_and_counts_the_others() -> None:
    expected = [reply(ids=[1, 2]) for _ in QUESTIONS]
    result = compared("in flight", QUESTIONS, expected, [reply(ids=[1, 3]) for _ in QUESTIONS], is_judged=True)
    assert result.verdict is Verdict.FAIL
    assert "in flight: 4 of 4 differ: row-0 (token ids, position 1: 3 instead of 2), row-1" in result.reason
    assert result.reason.endswith("and 1 more")
    assert len(result.document()["differences"]) == 4
    assert compared("unary", QUESTIONS, expected, expected, is_judged=True).verdict is Verdict.PASS
    assert ServedResult("all", 0, doubt="it was skipped").verdict is Verdict.INCONCLUSIVE


def draws(*ids: int, log_prob: float = -3.0) -> list[ServedAnswer]:
    return [reply(ids=[token, token], log_probs=[log_prob, log_prob]) for token in ids]


def test_seeds() -> None:
    alone, other = draws(1, 2, 3, 4), draws(1, 2, 3, 9)
    assert judge_seeds(QUESTIONS, alone, alone, other, is_judged=True).verdict is Verdict.PASS
    not_its_own = judge_seeds(QUESTIONS, alone, other, other, is_judged=True)
    assert [difference.sample_id for difference in not_its_own.differences] == ["row-3"]
    ignored = judge_seeds(QUESTIONS, alone, alone, alone, is_judged=True)
    assert "another seed: it produced the same 4 answers" in ignored.reason
    sure = draws(1, 2, 3, 4, log_prob=-0.01)
    unremarkable = judge_seeds(QUESTIONS, sure, sure, sure, is_judged=True)
    assert (unremarkable.verdict, len(unremarkable.notes)) == (Verdict.PASS, 1)
    assert judge_seeds(QUESTIONS, alone, alone, [failed()] * 4, is_judged=True).verdict is Verdict.FAIL


def test_how_many_were_under_way_at_the_same_time() -> None:
    times = [(0.0, 2.0), (1.0, 3.0), (1.5, 1.75), (5.0, 6.0)]
    assert most_at_once([Record(started=begin, arrived=[end]) for begin, end in times]) == 3
    assert most_at_once([Record()]) == 0
