"""Keeps a run's answers in a file next to its report, so that an interrupted run can be resumed.

The file is valid for the same engine (size and time of each of its files), questions, options and versions. A line is
one answer, or the engine's decisions on one of the baseline's. The first sample is always answered again, so that every
run has its own times.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeAlias

import llmserve
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.evaluation.answers import Answer, Sample
from llmserve.evaluation.candidates import WARM_UP, Candidate, CandidateRun
from llmserve.evaluation.decisions import Decision, pack, unpack
from llmserve.evaluation.kept_lines import KeptLines, kept_lines

FORMAT = 1
FIRST = "eval-0"  # request of the first sample

Told: TypeAlias = tuple[str, Answer | tuple[Decision, ...]]  # by the request's id


def identity_of(directory: EngineDirectory, questions: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that the answers depend on, for JSON. `questions`: anything with a stable `repr`."""
    files = [directory.path / name for name in sorted(directory.manifest.files)]
    code = [path for path in sorted(Path(llmserve.__file__).parent.rglob("*")) if path.suffix in (".py", ".so")]
    return {
        "format": FORMAT,
        "engine": directory.manifest.engine_digest,
        "files": _digest([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]),
        "code": _digest([(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in code]),
        "questions": _digest(questions),
        "options": dict(options),
    }


def _digest(parts: Sequence[Any]) -> str:
    return hashlib.sha256(repr(parts).encode(errors="replace")).hexdigest()


class KeptAnswers:
    """Answers by request id, from earlier runs and this one."""

    def __init__(self, lines: KeptLines[Told]) -> None:
        self._lines = lines
        self._answers: dict[str, Answer] = {}
        self._decisions: dict[str, tuple[Decision, ...]] = {}
        for request_id, told in lines.earlier:
            if request_id == FIRST or request_id.startswith(f"{FIRST}-"):
                continue
            if isinstance(told, Answer):
                self._answers[request_id] = told
            else:
                self._decisions[request_id] = told

    def candidate(self, candidate: Candidate) -> Candidate:
        """The same candidate, but kept answers are not requested again."""
        return _KeptCandidate(candidate, self)

    def is_kept(self, index: int) -> bool:
        """Whether an earlier run has the answer to this sample, or to the first of its choices."""
        return f"eval-{index}" in self._answers or f"eval-{index}-0" in self._decisions

    def answer(self, request_id: str) -> Answer | None:
        return self._answers.get(request_id)

    def decisions(self, request_id: str) -> tuple[Decision, ...] | None:
        return self._decisions.get(request_id)

    def keep_answer(self, request_id: str, answer: Answer) -> None:
        self._lines.add({"request": request_id, "answer": asdict(answer)})

    def keep_decisions(self, request_id: str, decisions: Sequence[Decision]) -> None:
        self._lines.add({"request": request_id, "decisions": pack(decisions), "count": len(decisions)})


def timed(run: CandidateRun, kept: KeptAnswers | None) -> CandidateRun:
    """With the times of the answers from this run."""
    if kept is None:
        return run
    return replace(run, fresh=tuple(index for index in range(len(run.answers)) if not kept.is_kept(index)))


@contextmanager
def kept_answers(path: Path, identity: Mapping[str, Any]) -> Iterator[KeptAnswers]:
    """For the run that `identity` describes. `InvalidArgument` if another run writes to it, or it is not writable."""
    with kept_lines(path, identity, _told, taken="use another --output") as lines:
        yield KeptAnswers(lines)


def _told(line: Mapping[str, Any]) -> Told:
    return line["request"], _answer(line) if "answer" in line else _decisions(line)


def _answer(line: Mapping[str, Any]) -> Answer:
    content = dict(line["answer"])
    ids = content["token_ids"]
    content |= {"decisions": (), "log_likelihoods": (), "rounding": ()}
    content |= {"token_ids": None if ids is None else tuple(ids)}
    return Answer(**content)


def _decisions(line: Mapping[str, Any]) -> tuple[Decision, ...]:
    return unpack(line["decisions"], line["count"])


class _KeptCandidate:
    def __init__(self, candidate: Candidate, kept: KeptAnswers) -> None:
        self._candidate = candidate
        self._kept = kept

    @property
    def name(self) -> str:
        return self._candidate.name

    async def answer(self, sample: Sample, request_id: str) -> Answer:
        if (kept := self._kept.answer(request_id)) is not None:
            return kept
        answer = await self._candidate.answer(sample, request_id)
        if not request_id.startswith(WARM_UP):
            self._kept.keep_answer(request_id, answer)
        return answer

    async def decide(self, prompt: Sequence[int], tokens: Sequence[int], request_id: str) -> tuple[Decision, ...]:
        if (kept := self._kept.decisions(request_id)) is not None:
            return kept
        decisions = await self._candidate.decide(prompt, tokens, request_id)
        if not request_id.startswith(WARM_UP):
            self._kept.keep_decisions(request_id, decisions)
        return decisions
