"""What a run has been told so far, in a file beside its report: an interrupted run goes on where it stopped.

The first line says what the answers depend on: the engine with the size and time of each of its files, the questions,
the options, the versions. A file that says anything else there is of another run, and begins anew. Every other line is
one answer, or what the engine said about one of the baseline's, written as soon as it was there. The first sample is
always asked again, so that every run has times of its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from io import BufferedRandom
from pathlib import Path
from typing import Any

import llmserve
from llmserve.engine.artifact import EngineDirectory
from llmserve.errors import InvalidArgument
from llmserve.evaluation.answers import Answer, Sample
from llmserve.evaluation.candidates import WARM_UP, Candidate, CandidateRun
from llmserve.evaluation.decisions import Decision, pack, unpack

FORMAT = 1
FIRST = "eval-0"  # request of the first sample


def identity_of(directory: EngineDirectory, questions: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """What answers to these questions depend on, as JSON holds it. `questions`: anything with a stable `repr`."""
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
    """By request id; of the runs before this one, and of this one."""

    def __init__(self, file: BufferedRandom, lines: Sequence[Mapping[str, Any]]) -> None:
        self._file = file
        self._answers = {line["request"]: _answer(line) for line in lines if "answer" in line}
        self._decisions = {line["request"]: _decisions(line) for line in lines if "decisions" in line}

    def candidate(self, candidate: Candidate) -> Candidate:
        """The same, but it is not asked again."""
        return _KeptCandidate(candidate, self)

    def is_kept(self, index: int) -> bool:
        """Whether a run before this one has the answer to this sample, or to the first of its choices."""
        return f"eval-{index}" in self._answers or f"eval-{index}-0" in self._decisions

    def answer(self, request_id: str) -> Answer | None:
        return self._answers.get(request_id)

    def decisions(self, request_id: str) -> tuple[Decision, ...] | None:
        return self._decisions.get(request_id)

    def keep_answer(self, request_id: str, answer: Answer) -> None:
        self._write({"request": request_id, "answer": asdict(answer)})

    def keep_decisions(self, request_id: str, decisions: Sequence[Decision]) -> None:
        self._write({"request": request_id, "decisions": pack(decisions), "count": len(decisions)})

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()


def timed(run: CandidateRun, kept: KeptAnswers | None) -> CandidateRun:
    """With the times of those answers that are this run's own."""
    if kept is None:
        return run
    return replace(run, fresh=tuple(index for index in range(len(run.answers)) if not kept.is_kept(index)))


@contextmanager
def kept_answers(path: Path, identity: Mapping[str, Any]) -> Iterator[KeptAnswers]:
    """Of the run that `identity` describes. `InvalidArgument` while another run writes to the file, or nobody can."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        file = path.open("r+b")
    except OSError as error:
        raise InvalidArgument(f"answers cannot be kept in {path}: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InvalidArgument(f"another run keeps its answers in {path}; give this one another --output") from error
        yield KeptAnswers(file, _read(file, identity))


def _read(file: BufferedRandom, identity: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every whole line of this run; what follows them is cut off, and a file of another run emptied."""
    head = json.dumps(identity).encode() + b"\n"
    if file.readline() != head:
        file.seek(0)
        file.truncate()
        file.write(head)
        file.flush()
        return []
    lines = []
    end = file.tell()
    for text in file:
        try:
            line = json.loads(text)
            _answer(line) if "answer" in line else _decisions(line)
        except (ValueError, KeyError, TypeError):  # cut off while it was written
            break
        if not text.endswith(b"\n"):
            break
        if line["request"] != FIRST and not line["request"].startswith(f"{FIRST}-"):
            lines.append(line)
        end += len(text)
    file.seek(end)
    file.truncate()
    return lines


def _answer(line: Mapping[str, Any]) -> Answer:
    content = dict(line["answer"])
    ids = content["token_ids"]
    content |= {"token_ids": None if ids is None else tuple(ids), "decisions": (), "log_likelihoods": ()}
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
