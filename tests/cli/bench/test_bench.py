"""`llmserve bench` as a program: against servers that answer as they are told, and against what is no server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from llmserve.cli.bench.options import BenchOptions
from llmserve.cli.bench.plan import plan_of
from llmserve.cli.output_file import check_writable, write_file
from llmserve.errors import InvalidArgument
from tests.benchmark.scripted_server import HOST, Script, scripted_server
from tests.cli.chat.terminal import LLMSERVE


def bench(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [*LLMSERVE, "bench", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd, env=environment)


def test_a_sweep_is_told_written_and_drawn(tmp_path: Path) -> None:
    with scripted_server(lambda number: Script(0.02, 0.005, 5)) as server:
        done = bench(
            "--url", server.url, "--concurrency", "1,3", "--requests", "12", "--warmup", "2", "--input-tokens",
            "uniform:5:9", "--output-tokens", "7", "--slo", "ttft:10s", "--slo", "e2e:1ms", "--json", "out.json",
            "--plot", "out.svg", "--api-key", "sk-secret", "--extra", '{"temperature": 0}', cwd=tmp_path,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (
        0,
        "note: the server cuts prompts: those made here are taken to have 1.3 tokens a word\n",
    )
    shown = done.stdout
    for words in (
        f"model at {server.url}; chat, a closed loop, 12 requests; prompts of uniform:5:9 tokens, answers of 7",
        "concurrency 1", "concurrency 3", "time to first token, ms",
        "goodput: 0.00 requests/s, 0.0% of all, within ttft", "(12 answered in",
        "tokens/s by concurrency", "TTFT p99, ms",
    ):  # fmt: skip
        assert words in shown, shown
    text = (tmp_path / "out.json").read_text()
    assert "sk-secret" not in text
    document = json.loads(text)
    assert [run["concurrency"] for run in document["runs"]] == [1, 3]
    assert document["settings"]["input_tokens"] == "uniform:5:9"
    for run in document["runs"]:
        assert (run["request_count"], run["error_request_count"], run["good_request_count"]) == (12, 0, 0)
        assert run["output_sequence_length"]["avg"] == 5
        assert run["time_to_first_token"]["min"] >= 20
    assert len(server.served) == 2 + 2 + 24  # the length of words, the warm-up, the load
    assert {served.body["max_tokens"] for served in server.served[2:]} == {7}
    assert {served.body["temperature"] for served in server.served} == {0}
    ElementTree.fromstring((tmp_path / "out.svg").read_text())


def test_failures_are_told_by_kind_and_only_a_load_without_answers_fails(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("hello\n")
    options = ["--prompts", str(tmp_path / "p.txt"), "--warmup", "0", "--requests", "8"]
    with scripted_server(lambda number: Script(status=429, message="slow down") if number % 2 else Script()) as server:
        some = bench("--url", server.url, *options)
    assert some.returncode == 0
    assert "failed: 4 x HTTP 429 (slow down)" in some.stdout
    with scripted_server(lambda number: Script(status=429, message="slow down")) as server:
        none = bench("--url", server.url, *options)
    assert (none.returncode, none.stderr) == (1, "error: no request has been answered\n")
    assert "failed: 8 x HTTP 429 (slow down)" in none.stdout


def test_what_fails_before_there_is_load_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("hello\n")
    with scripted_server(lambda number: Script(status=401, message="no key")) as server:
        probed = bench("--url", server.url)
        warmed = bench("--url", server.url, "--prompts", str(tmp_path / "p.txt"))
    for done in (probed, warmed):
        assert done.returncode == 2
        assert f"error: {server.url} requires a valid API key: give it with --api-key KEY" in done.stderr
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
    for protocol in ("chat", "grpc"):
        nobody = bench("--url", f"{HOST}:{port}", "--protocol", protocol)
        assert nobody.returncode == 1
        assert nobody.stderr.startswith(f"error: no server answers at {HOST}:{port}")
        assert "Traceback" not in nobody.stderr


def test_a_server_that_is_gone_ends_the_load(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("hello\n")
    with scripted_server(lambda number: Script(0.01)) as server:
        command = [*LLMSERVE, "bench", "--url", server.url, "--prompts", str(tmp_path / "p.txt"), "--duration", "600"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while len(server.served) < 20:
            assert process.poll() is None
            time.sleep(0.05)
    shown, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "x connection refused" in shown
    assert "answered in" in shown
    assert "error: the server is gone" in said


def test_ctrl_c_ends_a_load_and_reports_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("hello\n")
    with scripted_server(lambda number: Script(0.01)) as server:
        command = [*LLMSERVE, "bench", "--url", server.url, "--prompts", str(tmp_path / "p.txt"), "--duration", "600"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while len(server.served) < 20:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        shown, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "")
    assert "answered in" in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"input_tokens": "many", "output_tokens": "-1"},
            ["--input-tokens: 'many' is not a valid length", "--output-tokens: '-1'"],
        ),
        ({"rate": "0", "slo": ["ttft:1"]}, ["--rate: '0' is not a number above 0", "--slo ttft:1: expected"]),
        ({"rate": "1,nan"}, ["--rate: '1,nan' is not a number"]),
        ({"concurrency": "1.5"}, ["--concurrency: '1.5': expected whole numbers"]),
        ({"concurrency": "1", "rate": "1"}, ["--rate and --concurrency"]),
        ({"arrivals": "constant"}, ["--arrivals requires --rate"]),
        ({"arrivals": "gamma:0", "rate": "1"}, ["--arrivals: 'gamma:0' is not an arrival process"]),
        ({"requests": 5, "duration": 5.0}, ["--requests and --duration: give one of them"]),
        ({"duration": 0.0, "timeout": -1.0}, ["--duration 0: expected more", "--timeout -1: expected more"]),
        ({"prompts": Path("/nowhere/x")}, ["--prompts /nowhere/x cannot be read"]),
        ({"plot": Path("x.svg")}, ["--plot requires a sweep"]),
        ({"extra": "{"}, ["--extra: '{' is not JSON"]),
        ({"extra": "[]"}, ["--extra: '[]' is not a JSON object"]),
    ],
)
def test_everything_that_is_wrong_is_told_at_once(options: dict[str, object], words: list[str]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        plan_of(BenchOptions(**options))  # type: ignore[arg-type]
    for each in words:
        assert each in str(caught.value)


def test_without_a_folder_for_the_report_nothing_is_measured() -> None:
    done = bench("--json", "/nowhere/out.json")
    assert (done.returncode, done.stderr) == (
        2, "error: /nowhere/out.json cannot be written: no such directory: /nowhere\n",
    )  # fmt: skip


def test_a_report_that_cannot_be_written_is_known_before_the_load(tmp_path: Path) -> None:
    for path, reason in ((tmp_path, "Is a directory"), (Path("/proc/x.json"), "No such file or directory")):
        done = bench("--json", str(path))
        assert (done.returncode, done.stderr) == (2, f"error: {path} cannot be written: {reason}\n")
    done = bench("--json", "kept.json", "--plot", str(tmp_path), "--rate", "1,2", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, f"error: {tmp_path} cannot be written: Is a directory\n")
    assert not (tmp_path / "kept.json").exists()


def test_files_are_as_they_were_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for name in ("old", "new", "pipe", "link"):
        check_writable(tmp_path / name)
    assert (tmp_path / "link").is_symlink()
    assert not (tmp_path / "nothing").exists()
    assert (tmp_path / "old").read_text() == "old"
    assert not (tmp_path / "new").exists()
    with pytest.raises(InvalidArgument, match="cannot be written: Is a directory"):
        write_file(tmp_path, "text")


def test_what_is_asked_for() -> None:
    plan = plan_of(BenchOptions(rate="1,2.5", duration=10, seed=7, slo=["itl:50ms"]))
    assert (plan.swept, plan.points) == ("rate", [1, 2.5])
    assert [(load.rate, load.num_requests, load.duration_s, load.seed) for load in plan.loads] == [
        (1, None, 10, 7), (2.5, None, 10, 7),
    ]  # fmt: skip
    (load,) = plan_of(BenchOptions()).loads
    assert (load.concurrency, load.num_requests) == (1, 100)
