"""A CUDA engine behind the shipped pipeline: a real server process, its kernels interpreted, beside one on the CPU."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.builder.targets.cuda.target import CudaTarget
from tests.checkpoints import make_checkpoint
from tests.e2e.conftest import ServerProcess, start_server
from tests.e2e.test_streaming import Stream, client_inputs, streamed_text, tensor, used_blocks, wait_for_idle
from tests.engine.cuda.engines import WIDE_TILES
from tests.engine.cuda.fake_device import FakeCompiler

INTERPRETED = (sys.executable, "-m", "tests.fakes.interpreted_gpu")
PROMPTS = ("The small red fox", "A river finds", "In winter the lake freezes over")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ServerProcess]]:
    """By target, of one checkpoint."""
    folder = tmp_path_factory.mktemp("cuda")
    checkpoint = make_checkpoint(folder / "checkpoint", "baichuan2-7b", num_hidden_layers=1)
    limits = {"dtype": "float32", "max_seq_len": 96, "max_num_tokens": 64, "max_batch_size": 4, "tokens_per_block": 16}
    cuda = BuildOptions(target="cuda", given={"gpu": "sm_90"}, **limits)  # type: ignore[arg-type]
    build_engine(checkpoint, folder / "cuda", cuda, target=CudaTarget(FakeCompiler(), WIDE_TILES))
    build_engine(checkpoint, folder / "cpu", BuildOptions(**limits))  # type: ignore[arg-type]
    started = {
        "cpu": start_server(str(folder / "cpu")),
        "cuda": start_server(str(folder / "cuda"), program=INTERPRETED),
    }
    yield started
    for server in started.values():
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0


def test_streams_are_those_of_the_cpu(servers: dict[str, ServerProcess]) -> None:
    """Over gRPC, several at a time."""
    expected = ["".join(streamed_text(servers["cpu"].grpc, prompt, max_tokens=8)) for prompt in PROMPTS]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda prompt: streamed_text(servers["cuda"].grpc, prompt, max_tokens=8), PROMPTS))
    assert ["".join(deltas) for deltas in found] == expected
    wait_for_idle(servers["cuda"])


def test_draws_penalties_and_log_probs_are_those_of_the_cpu(servers: dict[str, ServerProcess]) -> None:
    answers = []
    for server in servers.values():
        client = openai.OpenAI(base_url=f"{server.http}/v1", api_key="none")
        model = client.models.list().data[0].id
        drawn = client.completions.create(
            model=model,
            prompt=PROMPTS[0],
            max_tokens=8,
            temperature=1.2,
            top_p=0.9,
            seed=11,
            n=2,
            frequency_penalty=0.5,
        )
        told = client.completions.create(model=model, prompt=PROMPTS[1], max_tokens=3, temperature=0, logprobs=2)
        logprobs = told.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        answers.append(([choice.text for choice in drawn.choices], told.choices[0].text, logprobs.token_logprobs))
    (texts, text, log_probs), (cuda_texts, cuda_text, cuda_log_probs) = answers
    assert (cuda_texts, cuda_text) == (texts, text)
    np.testing.assert_allclose(cuda_log_probs, log_probs, rtol=1e-4)


def test_a_client_that_goes_away_frees_its_blocks(servers: dict[str, ServerProcess]) -> None:
    stream = Stream(servers["cuda"].grpc)
    stream.send("ensemble", [*client_inputs(PROMPTS[2], max_tokens=60), tensor("end_id", -1, np.int32)])
    next(stream.responses())
    assert used_blocks(servers["cuda"])
    stream.close()
    wait_for_idle(servers["cuda"])
