"""The commands of the README against the demo checkpoint, each in a process of its own."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton

from llmserve.engine.cpu.layout import read_header
from llmserve.engine.directory.gate_record import RECORDS_FILE
from llmserve.engine.directory.manifest import Manifest
from tests.e2e.conftest import CHECKPOINT, LLMSERVE, ROOT, ServerProcess, llmserve, start_server
from tests.e2e.test_streaming import DOCUMENTS, Stream, client_inputs, tensor
from tests.engine.directories import seal

FULL_SUITE = str(ROOT / "eval/suites/docstrings.yaml")
SMOKE_SUITE = str(ROOT / "eval/suites/docstrings-smoke.yaml")
PROMPT = f"Summarize:\n{DOCUMENTS[0]}"


def test_run_prints_text_and_speed(demo_engine: Path) -> None:
    done = llmserve("run", str(demo_engine), "--chat", "--input-text", PROMPT, "--max-output-len", "32")
    assert done.returncode == 0, done.stderr
    assert "1 prompts" in done.stdout
    assert "tokens/s" in done.stdout


def test_run_streams_what_it_prints_at_once(demo_engine: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Return the sum of two numbers.\n\nRead a file line by line.\n")
    arguments = ("run", str(demo_engine), "--chat", "--input-file", str(prompts), "--max-output-len", "24")
    whole, streamed = llmserve(*arguments), llmserve(*arguments, "--streaming")
    assert streamed.returncode == 0, streamed.stderr
    answers = [line.removeprefix("--> ") for line in streamed.stdout.splitlines() if line.startswith("--> ")]
    assert len(answers) == 2
    for answer in answers:
        assert f"--> {answer}  (" in whole.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--input-text"),
        (("--input-text", "x", "--max-output-len", "0"), "max_tokens must be at least 1"),
        (("--input-text", "x", "--temperature", "nan", "--top-k", "-1"), "2 problems"),
        (("--input-file", "/nonexistent"), "cannot be read"),
    ],
)
def test_run_refuses_bad_input(demo_engine: Path, arguments: tuple[str, ...], words: str) -> None:
    done = llmserve("run", str(demo_engine), *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_run_names_what_is_not_an_engine() -> None:
    done = llmserve("run", str(CHECKPOINT), "--input-text", "x")
    assert done.returncode == 2
    assert "compile it first: llmserve build" in done.stderr


def test_chat_streams_one_answer(server: ServerProcess) -> None:
    done = llmserve("chat", "--url", server.grpc, "--once", PROMPT)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 2


def test_chat_says_that_nobody_listens() -> None:
    done = llmserve("chat", "--url", "127.0.0.1:1", "--once", "Hello")
    assert done.returncode == 1
    assert "127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr


def damage(engine: Path) -> None:
    """Scramble part of the weights and seal the engine again: only its answers can tell."""
    engine_file = engine / "rank0.engine"
    manifest = Manifest.from_json((engine / "manifest.json").read_text())
    header = read_header(engine_file)
    data = bytearray(engine_file.read_bytes())
    half = np.frombuffer(data, np.uint16)[-header.vocab_size * 100 :]
    half[:] = np.roll(half, 1000)
    engine_file.write_bytes(data)
    seal(engine, manifest)


def test_eval_fails_an_engine_whose_weights_are_damaged(demo_engine: Path, tmp_path: Path) -> None:
    engine = tmp_path / "damaged"
    shutil.copytree(demo_engine, engine, ignore=shutil.ignore_patterns(RECORDS_FILE))
    damage(engine)
    for suite in (FULL_SUITE, SMOKE_SUITE):  # fifty samples are enough for the evidence
        report = tmp_path / "damaged.json"
        done = llmserve(
            "eval", str(engine), "--hf-model-dir", str(CHECKPOINT), "--suite", suite, "--output", str(report),
            "--no-as-served", "--num-samples", "50",
        )  # fmt: skip
        assert done.returncode == 1, done.stdout + done.stderr
        assert "FAIL: " in done.stdout


def test_sigterm_drains(demo_engine: Path) -> None:
    server = start_server(str(demo_engine))
    stream = Stream(server.grpc)
    stream.send("ensemble", [*client_inputs(PROMPT, max_tokens=400), tensor("end_id", -1, np.int32)])
    responses = stream.responses()
    next(responses)
    server.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 60
    while is_ready(server):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    body = json.dumps({"text_input": "x", "max_tokens": 4}).encode()
    with pytest.raises(urllib.error.HTTPError, match="503"):
        urllib.request.urlopen(f"{server.http}/v2/models/ensemble/generate", body, timeout=10)
    assert sum(1 for _ in responses) > 100, "the running answer was cut"
    stream.close()
    assert server.process.wait(timeout=40) == 0


def is_ready(server: ServerProcess) -> bool:
    try:
        urllib.request.urlopen(f"{server.http}/v2/health/ready", timeout=5).close()
    except urllib.error.HTTPError:
        return False
    return True


def test_a_port_in_use_is_one_clear_error(demo_engine: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = llmserve(
            "serve", str(demo_engine), "--host", "127.0.0.1", "--http-port", str(port),
            "--grpc-port", "0", "--metrics-port", "0", timeout=60,
        )  # fmt: skip
    assert done.returncode == 1
    assert str(port) in done.stderr
    assert "Traceback" not in done.stderr


def test_too_large_a_kv_pool_is_refused_at_load(demo_engine: Path, tmp_path: Path) -> None:
    repository = tmp_path / "pipelines"
    shutil.copytree(ROOT / "pipelines", repository)
    config = repository / "tensorrt_llm/config.pbtxt"
    extra = 'parameters { key: "max_tokens_in_paged_kv_cache" value { string_value: "999999999999" } }\n'
    config.write_text(config.read_text().replace("engines/default", str(demo_engine)) + extra)
    for name in ("preprocessing", "postprocessing"):
        other = repository / name / "config.pbtxt"
        other.write_text(other.read_text().replace("engines/default", str(demo_engine)))
    done = llmserve("serve", "--model-repository", str(repository), "--http-port", "0", "--grpc-port", "0",
                    "--metrics-port", "0", timeout=60)  # fmt: skip
    assert done.returncode == 1
    assert "max_tokens_in_paged_kv_cache" in done.stdout + done.stderr


def test_each_model_of_the_pipeline_answers_on_its_own(server: ServerProcess) -> None:
    client = triton.InferenceServerClient(server.grpc)
    query = tensor("QUERY", b"Return the sum.", object)
    prepared = client.infer("preprocessing", [query, tensor("REQUEST_OUTPUT_LEN", 8, np.int32)])
    ids = prepared.as_numpy("INPUT_ID")
    assert ids.shape[0] == 1
    assert prepared.as_numpy("REQUEST_INPUT_LEN").item() == ids.shape[1]
    tokens = triton.InferInput("TOKENS_BATCH", [1, 1, ids.shape[1]], "INT32")
    tokens.set_data_from_numpy(ids[None])
    text = client.infer("postprocessing", [tokens, tensor("SEQUENCE_LENGTH", ids.shape[1], np.int32)])
    assert text.as_numpy("OUTPUT").reshape(-1)[0] == b"Return the sum."


def test_a_killed_build_leaves_nothing_and_the_next_one_works(tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    command = [LLMSERVE, "build", str(CHECKPOINT), "--output-dir", str(engine)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while process.poll() is None and not list(tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=30)
    if process.returncode != 0:
        assert list(tmp_path.iterdir()) == []
    assert llmserve("build", str(CHECKPOINT), "--output-dir", str(engine)).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]
