from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmserve.core import TopTokens
from llmserve.errors import InvalidArgument
from llmserve.evaluation.answers import Answer, Sample
from llmserve.evaluation.candidates import Candidate, decide_all, run_candidate
from llmserve.evaluation.decisions import Decision
from llmserve.evaluation.kept import KeptAnswers, kept_answers

SAMPLES = [Sample(str(index), f"question {index}", "unused") for index in range(6)]
IDENTITY: dict[str, Any] = {"engine": "ab", "options": {"threads": 2}}


class Interrupted(Exception):
    pass


class CountingCandidate:
    """Answers with the sample's id; is interrupted at `stops_at`."""

    name = "counting"

    def __init__(self, stops_at: str = "") -> None:
        self.stops_at = stops_at
        self.asked: list[str] = []

    async def _note(self, request_id: str) -> None:
        await asyncio.sleep(0.001)
        if request_id == self.stops_at:
            raise Interrupted
        self.asked.append(request_id)

    async def answer(self, sample: Sample, request_id: str) -> Answer:
        await self._note(request_id)
        return Answer(f"né {sample.id}", 3, 2, 0.25, (7, int(sample.id)), prompt_digest="ab12")

    async def decide(self, prompt: Sequence[int], tokens: Sequence[int], request_id: str) -> tuple[Decision, ...]:
        await self._note(request_id)
        return tuple(Decision(token, -0.25, TopTokens((token, 9), (-0.25, -1.5))) for token in tokens)


async def ask(candidate: Candidate) -> tuple[list[Answer], list[tuple[Decision, ...]]]:
    run = await run_candidate(candidate, SAMPLES, concurrency=1)
    decisions = await decide_all(candidate, SAMPLES, [[1]] * 6, [[index] for index in range(6)], concurrency=1)
    return run.answers, decisions


@contextmanager
def kept_of(path: Path, **changes: Any) -> Iterator[KeptAnswers]:
    with kept_answers(path, IDENTITY | changes) as kept:
        yield kept


@pytest.mark.parametrize("stops_at", ["eval-1", "eval-4", "eval-decide-3"])
async def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path, stops_at: str) -> None:
    path = tmp_path / "new" / "r.partial.jsonl"
    wanted = await ask(whole := CountingCandidate())
    first, second = CountingCandidate(stops_at), CountingCandidate()
    with kept_of(path) as kept, pytest.raises(Interrupted):
        await ask(kept.candidate(first))
    with kept_of(path) as kept:
        assert await ask(kept.candidate(second)) == wanted
    again = ["eval-warm-up", "eval-0"]  # so that every run has a time of its own
    assert second.asked == again + whole.asked[len(first.asked) :]
    with kept_of(path) as kept:
        assert [kept.is_kept(index) for index in range(6)] == [False, *[True] * 5]
        assert await ask(kept.candidate(third := CountingCandidate())) == wanted
    assert third.asked == again


@pytest.mark.parametrize("change", [{"engine": "cd"}, {"options": {"threads": 1}}, {"more": 1}])
async def test_answers_of_another_run_are_never_used(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "r.partial.jsonl"
    with kept_of(path) as kept:
        await ask(kept.candidate(CountingCandidate()))
    with kept_of(path, **change) as kept:
        await ask(kept.candidate(other := CountingCandidate()))
    assert len(other.asked) == 13
    assert json.loads(path.read_text().splitlines()[0]) == IDENTITY | change


@pytest.mark.parametrize(
    "damage", [b'{"request": "eval-3", "ans', b"\x00\xff\n", b'{"request": "eval-3", "answer": {}}\n']
)
async def test_a_line_that_was_cut_off_is_asked_again(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "r.partial.jsonl"
    with kept_of(path) as kept, pytest.raises(Interrupted):
        await ask(kept.candidate(CountingCandidate("eval-3")))
    whole = path.read_bytes()
    path.write_bytes(whole + damage)
    with kept_of(path) as kept, pytest.raises(Interrupted):
        await ask(kept.candidate(second := CountingCandidate("eval-4")))
    assert second.asked == ["eval-warm-up", "eval-0", "eval-3"]
    assert path.read_bytes().startswith(whole + b'{"request": "eval-0"')
    for line in path.read_text().splitlines():
        json.loads(line)


def test_two_runs_do_not_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "r.partial.jsonl"
    with kept_of(path), pytest.raises(InvalidArgument, match="another --output"), kept_of(path):
        pass
    with kept_of(path):
        pass


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match=r"r\.partial\.jsonl"), kept_of(tmp_path / "file" / "r.partial.jsonl"):
        pass


async def test_answers_come_back_as_they_were(tmp_path: Path) -> None:
    answer = Answer("a\u2028b", 4, 2, 0.125, None, prompt_digest="x")
    with kept_of(tmp_path / "k") as kept:
        kept.keep_answer("eval-1", answer)
        kept.keep_answer("eval-2", replace(answer, token_ids=()))
        kept.keep_decisions("eval-1-0", ())
    with kept_of(tmp_path / "k") as kept:
        assert kept.answer("eval-1") == answer
        assert kept.answer("eval-2") == replace(answer, token_ids=())
        assert kept.decisions("eval-1-0") == ()
