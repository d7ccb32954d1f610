"""`llmserve eval` on the demo engine, in process and through a running server, against the stored baseline."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.directory.gate_record import RECORDS_FILE, every_record
from tests.e2e.conftest import CHECKPOINT, LLMSERVE, ROOT, ServerProcess, llmserve

CHOICES = ROOT / "eval" / "suites" / "multiple-choice.yaml"
STRUCTURED = ROOT / "eval" / "suites" / "json-structured.yaml"
SMOKE = ROOT / "eval" / "suites" / "docstrings-smoke.yaml"


FEW_SERVED = ("--served-samples", "4")  # where as they are served is not what is looked at
CONDITIONS = {
    "alone", "as in this process", "prefix hits", "unary", "/v1 streamed", "/v1 unary", "/v1 log-probs",
    "seeded", "multi-byte", "drawn", "in flight", "staggered", "preempted",
}  # fmt: skip


def evaluate(output: Path, *arguments: str, suite: Path = SMOKE) -> dict[str, Any]:
    done = llmserve(
        "eval", *arguments, "--hf-model-dir", str(CHECKPOINT), "--suite", str(suite), "--output", str(output)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stored, computed on" in done.stdout
    assert suite is not SMOKE or "ROUGE-Lsum" in done.stdout
    report: dict[str, Any] = json.loads(output.read_text())
    return report


def test_server_and_process_give_the_same_answers(demo_engine: Path, server: ServerProcess, tmp_path: Path) -> None:
    inside = evaluate(tmp_path / "inside.json", str(demo_engine), "--concurrency", "1", *FEW_SERVED)
    outside = evaluate(tmp_path / "outside.json", "--url", server.grpc, "--concurrency", "16", *FEW_SERVED)
    texts = [[sample["engine"]["text"] for sample in report["samples"]] for report in (inside, outside)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 25
    counts = [[sample["engine"]["num_tokens"] for sample in report["samples"]] for report in (inside, outside)]
    assert counts[0] == counts[1]
    assert inside["evidence"]["positions"] > 500
    assert inside["evidence"] == outside["evidence"]  # to the bit: alone, and served among fifteen others
    assert inside["parity"]["exact_match_rate"] >= 0.9
    assert inside["metrics"]["rougeL"]["engine"] > 15
    assert abs(inside["metrics"]["rougeL"]["difference"]) < 1


def test_choices_are_as_likely_through_a_server(demo_engine: Path, server: ServerProcess, tmp_path: Path) -> None:
    few = ("--num-samples", "100", *FEW_SERVED)
    inside = evaluate(tmp_path / "inside.json", str(demo_engine), *few, suite=CHOICES)
    outside = evaluate(tmp_path / "outside.json", "--url", server.grpc, "--concurrency", "16", *few, suite=CHOICES)
    told = [[sample["engine"]["log_likelihoods"] for sample in report["samples"]] for report in (inside, outside)]
    assert told[0] == told[1]  # to the bit
    assert len(told[0]) == 100
    assert inside["metrics"] == outside["metrics"]
    assert inside["metrics"]["acc_norm"]["engine"] > 40  # a guess is right once in four


def test_structured_output_is_json_in_process_and_through_a_server(
    demo_engine: Path, server: ServerProcess, tmp_path: Path
) -> None:
    """The demo network knows no JSON, and writes nothing else when it is held to it."""
    inside = evaluate(tmp_path / "inside.json", str(demo_engine), *FEW_SERVED, suite=STRUCTURED)
    outside = evaluate(tmp_path / "outside.json", "--url", server.grpc, *FEW_SERVED, suite=STRUCTURED)
    for report in (inside, outside):
        assert report["metrics"]["json_valid"]["engine"] == 100.0
        assert report["metrics"]["json_valid"]["baseline"] < 5
    texts = [[sample["engine"]["text"] for sample in report["samples"]] for report in (inside, outside)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("how", ["kill", "terminate"])
def test_a_run_that_was_killed_goes_on_where_it_stopped(demo_engine: Path, tmp_path: Path, how: str) -> None:
    report, partial = tmp_path / "report.json", tmp_path / "report.partial.jsonl"
    arguments = ["eval", str(demo_engine), "--hf-model-dir", str(CHECKPOINT), "--suite", str(SMOKE), "--no-record"]
    arguments += ["--output", str(report), "--concurrency", "1", "--no-as-served"]
    process = subprocess.Popen([LLMSERVE, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not partial.exists() or partial.read_bytes().count(b"\n") < 10):
        time.sleep(0.02)
    getattr(process, how)()
    assert process.wait(timeout=30) != 0
    assert not report.exists()
    num_lines = partial.read_bytes().count(b"\n")
    done = llmserve(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(report.read_text())
    assert int(content["engine"]["kept_answers"]) >= min(num_lines - 2, 40)
    assert "answers come from before an interruption" in done.stdout
    assert not partial.exists()
    assert content["parity"]["exact_match_rate"] > 0.95


def test_it_is_asked_as_it_is_served_and_its_speed_is_compared(demo_engine: Path, tmp_path: Path) -> None:
    engine = shutil.copytree(demo_engine, tmp_path / "engine", ignore=shutil.ignore_patterns(RECORDS_FILE))
    first = evaluate(tmp_path / "first.json", str(engine))
    conditions = first["served"]["conditions"]
    assert conditions.keys() == CONDITIONS
    assert {(one["verdict"], one["judged"]) for one in conditions.values()} == {("pass", True)}
    assert {one["answers"] for name, one in conditions.items() if name not in ("seeded", "multi-byte", "drawn")} == {32}
    assert first["speed"]["times_worse"] == {}
    second = evaluate(tmp_path / "second.json", str(engine), *FEW_SERVED)
    assert second["speed"]["times_worse"].keys() == {"ttft", "itl", "throughput", "memory", "build", "open"}
    records = every_record(engine)
    assert [record.passed for record in records] == [True, True]
    assert records[0].line.content["speed"]["values"] == first["speed"]["values"]
    assert records[0].line.content["served"]["preempted"]["differences"] == 0


def test_a_server_tells_which_engine_it_has(demo_engine: Path, server: ServerProcess, tmp_path: Path) -> None:
    manifest = EngineDirectory.open(demo_engine).manifest
    (model,) = httpx.get(f"{server.http}/v1/models").json()["data"]
    told = model["engine"]
    assert (told["digest"], told["target"], told["precision"]) == (manifest.engine_digest, "cpu", "float")
    assert told["deterministic"] is True
    assert model["max_model_len"] == EngineDirectory.open(demo_engine).info().max_seq_len
    given = ("--url", server.grpc, "--http-url", server.http, "--num-samples", "40", *FEW_SERVED)
    report = evaluate(tmp_path / "url.json", *given)
    assert report["engine"]["engine_digest"] == manifest.engine_digest
    assert {"/v1 streamed", "in flight"} <= report["served"]["conditions"].keys()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_leaves_no_server_behind(demo_engine: Path, tmp_path: Path, number: int) -> None:
    command = [LLMSERVE, "eval", str(demo_engine), "--hf-model-dir", str(CHECKPOINT), "--suite", str(SMOKE)]
    command += ["--num-samples", "8", "--output", str(tmp_path / "r.json"), "--no-record"]
    with subprocess.Popen(command, cwd=ROOT) as process:
        evaluation = psutil.Process(process.pid)
        deadline = time.monotonic() + 60
        while not (servers := evaluation.children()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.5)
        process.send_signal(number)
        assert process.wait(60) != 0
    assert psutil.wait_procs(servers, timeout=30)[1] == []
    assert not (tmp_path / "r.json").exists()
