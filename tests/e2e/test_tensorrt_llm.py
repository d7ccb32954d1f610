"""The demo checkpoint built with `--target tensorrt_llm` and served, on a machine with fake GPUs, by real processes."""

from __future__ import annotations

import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.conftest import CHECKPOINT, ServerProcess, llmserve, start_server
from tests.e2e.test_streaming import (
    DOCUMENTS,
    Stream,
    client_inputs,
    metric,
    num_cancelled,
    streamed_text,
    tensor,
    used_blocks,
    wait_for_idle,
)
from tests.fakes.gpu_machine import environment
from tests.frontends.server import wait_until


@pytest.fixture(scope="module", params=["1.2", "1.3"])
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def gpu_engine(release: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    engine = tmp_path_factory.mktemp("engines") / f"demo-{release}"
    flags = ("--target", "tensorrt_llm", "--tp-size", "2", "--workers", "2", "--max-beam-width", "2")
    done = llmserve("build", str(CHECKPOINT), *flags, "--output-dir", str(engine), env=environment(release))
    assert done.returncode == 0, done.stderr
    mode = {"1.2": "tensorrt-llm 1.2.1, engine mode", "1.3": "tensorrt-llm 1.3.0, llm mode"}[release]
    assert f"{mode}, for 2 x NVIDIA Fake 80GB (compute capability 9.0)" in done.stdout
    return engine


@pytest.fixture(scope="module")
def gpu_server(gpu_engine: Path, release: str) -> Iterator[ServerProcess]:
    server = start_server(str(gpu_engine), env=environment(release))
    yield server
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=60) == 0


def test_the_texts_are_those_of_the_cpu_engine(gpu_server: ServerProcess, server: ServerProcess) -> None:
    prompts = [f"Summarize:\n{document}" for document in DOCUMENTS[:8]]
    expected = ["".join(streamed_text(server.grpc, prompt)) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        streamed = list(pool.map(lambda prompt: streamed_text(gpu_server.grpc, prompt), prompts))
    assert ["".join(deltas) for deltas in streamed] == expected
    assert max(map(len, streamed)) > 3
    assert "".join(streamed_text(gpu_server.grpc, prompts[0], stream=False)) == expected[0]
    wait_for_idle(gpu_server)


def test_a_client_that_goes_away_frees_its_request(gpu_server: ServerProcess) -> None:
    before = num_cancelled(gpu_server)
    stream = Stream(gpu_server.grpc)
    inputs = [*client_inputs("Tell me everything.", max_tokens=450), tensor("end_id", -1, np.int32)]
    stream.send("ensemble", inputs)
    next(stream.responses())
    stream.close()
    wait_for_idle(gpu_server)
    assert num_cancelled(gpu_server) == before + 1
    assert used_blocks(gpu_server) == 0


def test_the_metrics_are_the_librarys(gpu_server: ServerProcess) -> None:
    streamed_text(gpu_server.grpc, "The library counts from its first steps on.")
    wait_until(lambda: metric(gpu_server, "nv_trt_llm_runtime_memory_metrics", 'memory_type="gpu"') == 12345678)
    assert metric(gpu_server, "nv_trt_llm_kv_cache_block_metrics", 'kv_cache_block_type="tokens_per"') == 32
    assert urllib.request.urlopen(f"{gpu_server.http}/v2/health/ready", timeout=10).status == 200


def test_beams_are_one_answer(gpu_server: ServerProcess) -> None:
    given = client_inputs(f"Summarize:\n{DOCUMENTS[0]}", stream=False)
    inputs = [each for each in given if each.name() != "beam_width"]
    stream = Stream(gpu_server.grpc)
    try:
        stream.send("ensemble", [*inputs, tensor("beam_width", 2, np.int32)])
        texts = [result.as_numpy("text_output") for result in stream.responses()]
        assert [text.size for text in texts if text is not None] == [2]
        stream.send("ensemble", [*inputs, tensor("beam_width", 3, np.int32)])
        with pytest.raises(Exception, match="beam_width must be from 1 to 2"):
            list(stream.responses())
    finally:
        stream.close()


def test_an_executor_that_dies_ends_streams_and_readiness(release: str, gpu_engine: Path) -> None:
    slowly = environment(release, FAKE_TRTLLM_CRASH="77", FAKE_TRTLLM_EVENT_S="0.1")
    server = start_server(str(gpu_engine), env=slowly)
    try:
        assert status(f"{server.http}/v2/health/ready") == 200
        other, fatal = Stream(server.grpc), Stream(server.grpc)
        other.send("ensemble", [*client_inputs("Tell me everything.", max_tokens=450), tensor("end_id", -1, np.int32)])
        next(other.responses())
        fatal.send("ensemble", [*client_inputs("The end.", max_tokens=77), tensor("end_id", -1, np.int32)])
        for stream in (other, fatal):
            with pytest.raises(Exception, match="failed: "):
                list(stream.responses())
            stream.close()
        assert status(f"{server.http}/v2/health/ready") != 200
        assert status(f"{server.http}/v2/models/tensorrt_llm/ready") != 200
        assert status(f"{server.http}/v2/health/live") == 200
    finally:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0


def status(url: str) -> int:
    try:
        return int(urllib.request.urlopen(url, timeout=10).status)
    except urllib.error.HTTPError as error:
        return error.code


def test_without_the_library_the_server_says_what_is_missing(gpu_engine: Path) -> None:
    done = llmserve("serve", str(gpu_engine), "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", timeout=60)
    assert done.returncode != 0
    assert "tensorrt-llm, which is not installed" in done.stdout + done.stderr
    assert "nvidia-smi was not found" in done.stdout + done.stderr
