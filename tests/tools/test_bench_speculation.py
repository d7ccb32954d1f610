"""What `make bench-speculation` asks other engines."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools.bench_speculation import measure_peer
from tools.benchmark.lookup.lookup_job import Answer, LookupJob


def test_a_peer_answers_every_prompt_without_and_with(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = LookupJob("model.gguf", [[1, 2], [3]], num_tokens=10, rounds=3, threads=1)
    monkeypatch.setattr(sys, "stdin", io.StringIO(job.to_json()))
    assert LookupJob.read() == job
    asked: list[str] = []

    def answering(mode: str, seconds: float) -> Answer:
        def answer(prompt: Sequence[int], num_tokens: int) -> float:
            asked.append(mode)
            return seconds

        return answer

    job.run(answering("without", 2.0), answering("with", 1.0))
    assert json.loads(capsys.readouterr().out) == {"without": 5.0, "with": 10.0}
    assert asked == ["without", "without", "with", "with"] * 3


def test_a_peer_that_fails_is_reported() -> None:
    arguments = argparse.Namespace(gguf=Path("no.gguf"), tokens=4, rounds=1, threads=1)
    assert measure_peer(arguments, f"no_engine={sys.executable}", [[1]]).startswith("failed: ")
