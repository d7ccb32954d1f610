"""Triton clients of a cluster: `llmserve serve --cluster`, real workers and real clients."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.e2e.conftest import ServerProcess
from tests.e2e.test_streaming import DOCUMENTS, Stream, tensor
from tests.frontends.server import wait_until
from tools.cluster.local import LocalCluster, Server, is_there

pytestmark = pytest.mark.skipif(not is_there(), reason="there is no .venv-cluster: make cluster-env")
PROMPTS = [f"Summarize:\n{document}" for document in DOCUMENTS]
TYPES: dict[str, type] = {
    "text_input": object, "stop_words": object, "guided_decoding_guide_type": object, "guided_decoding_guide": object,
    "temperature": np.float32, "top_p": np.float32, "min_p": np.float32, "repetition_penalty": np.float32,
    "presence_penalty": np.float32, "frequency_penalty": np.float32, "seed": np.uint64, "stream": bool,
    "return_log_probs": bool, "return_prompt_log_probs": bool,
}  # fmt: skip
Parameters = dict[str, Any]
# Each would be lost, or go wrong after a failover, if the answer were continued as a longer prompt.
ASKED: dict[str, Parameters] = {
    "greedy with log-probs": {"temperature": 0.0, "return_log_probs": True, "num_top_log_probs": 3},
    "drawn": {"temperature": 1.1, "seed": 2**63 + 5, "top_p": 0.9, "top_k": 30, "min_p": 0.01},
    "stop words": {"temperature": 0.0, "stop_words": "the", "min_tokens": 30},
    "least tokens": {"temperature": 1.0, "seed": 3, "min_tokens": 60},
    "penalties": {
        "temperature": 0.9, "seed": 9, "presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.1,
    },
    "two answers": {"temperature": 1.0, "seed": 4, "num_return_sequences": 2},
    "a guide": {
        "temperature": 1.0, "seed": 1, "guided_decoding_guide_type": "regex",
        "guided_decoding_guide": "([a-z]{1,9} ){20}[a-z]{3}",
    },
    "scores of the prompt": {"temperature": 0.0, "return_prompt_log_probs": True},
}  # fmt: skip
COMPARED = (
    "output_token_ids", "output_log_probs", "cum_log_probs", "output_top_ids", "output_top_log_probs",
    "prompt_log_probs",
)  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, demo_engine: Path) -> Iterator[LocalCluster]:
    opened = LocalCluster(tmp_path_factory.mktemp("cluster"), demo_engine)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def own(cluster: LocalCluster, demo_engine: Path) -> Server:
    return cluster.add_server(demo_engine)


def inputs_of(prompt: str, max_tokens: int, parameters: Parameters) -> list[triton.InferInput]:
    values = {"text_input": prompt, "max_tokens": max_tokens, "stream": True, **parameters}
    return [
        tensor(name, value.encode() if isinstance(value, str) else value, TYPES.get(name, np.int32))
        for name, value in values.items()
    ]


def answer(
    url: str, prompt: str, parameters: Parameters, max_tokens: int = 80, heard: Callable[[], None] = lambda: None
) -> tuple[dict[int, str], dict[str, list[Any]]]:
    """The text of each sequence, and what else is told of each token."""
    stream = Stream(url)
    texts: dict[int, str] = {}
    told: dict[str, list[Any]] = {}
    try:
        stream.send("ensemble", inputs_of(prompt, max_tokens, parameters))
        for result in stream.responses():
            text = result.as_numpy("text_output")
            if text is None:
                continue
            heard()
            index = int(result.as_numpy("sequence_index").item())
            texts[index] = texts.get(index, "") + text.reshape(-1)[0].decode()
            for name in COMPARED:
                if (value := result.as_numpy(name)) is not None and name != "cum_log_probs":
                    told.setdefault(f"{name} {index}", []).extend(value.reshape(-1).tolist())
    finally:
        stream.close()
    return texts, told


@pytest.mark.parametrize("name", ASKED)
def test_answers_are_the_engines_own(name: str, server: ServerProcess, own: Server) -> None:
    """Identical texts, ids and log-probs, whatever is asked for."""
    for prompt in PROMPTS[:2]:
        assert answer(own.grpc, prompt, ASKED[name]) == answer(server.grpc, prompt, ASKED[name])


def test_what_is_wrong_is_said_as_by_the_engine(server: ServerProcess, own: Server) -> None:
    wrong = {"temperature": -1.0, "repetition_penalty": 0.0}
    said = []
    for url in (server.grpc, own.grpc):
        with pytest.raises(InferenceServerException) as error:
            answer(url, "x", wrong)
        said.append(str(error.value))
    assert said[0] == said[1]
    assert "temperature must not be negative" in said[0]


def test_prompts_go_where_their_beginning_is(own: Server) -> None:
    """An odd number of prompts: in turns, each would come to the other worker the second time. The router learns of a
    block with a delay, a longer one on a busy machine, so many sets are tried."""
    sets = [
        [f"Summarize:\n{number} {text}" for text in DOCUMENTS[begin : begin + 7]]
        for number in range(10)
        for begin in (4, 11, 18)
    ]
    assert any(are_cached(own, prompts) for prompts in sets)


def are_cached(own: Server, prompts: list[str]) -> bool:
    """Whether each prompt, asked for the second time, comes to the worker that has it in its cache."""
    for prompt in prompts:
        cached(own, prompt)
    return all(cached(own, prompt) for prompt in prompts)


def cached(own: Server, prompt: str) -> int:
    """Tokens of the prompt that its worker had in the cache."""
    body = {"model": "ensemble", "prompt": prompt, "max_tokens": 1}
    usage = httpx.post(f"{own.http}/v1/completions", json=body, timeout=60).raise_for_status().json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_clients_that_leave_free_their_blocks(cluster: LocalCluster, own: Server) -> None:
    before = cancelled(cluster)
    for number in range(8):
        stream = Stream(own.grpc)
        stream.send("ensemble", inputs_of(PROMPTS[number], 900, {"min_tokens": 900}))
        stream.results.get(timeout=60)
        stream.close()
    wait_until(lambda: cancelled(cluster) >= before + 4, timeout_s=60)  # Dynamo does not count every one
    wait_until(lambda: not (cluster.is_busy(0) or cluster.is_busy(1)), timeout_s=60)


def cancelled(cluster: LocalCluster) -> float:
    name = "dynamo_component_cancellation_total"
    lines = [line for number in (0, 1) for line in cluster.metrics(number).splitlines() if line.startswith(name)]
    return sum(float(line.split()[-1]) for line in lines)


def test_streams_of_lost_workers_fail_over_without_a_trace(tmp_path: Path, demo_engine: Path) -> None:
    """Every kind of request, twice. Of the workers that answer, one is killed, and one hangs with open connections."""
    cluster = LocalCluster(tmp_path / "cluster", demo_engine, num_workers=3)
    try:
        own = cluster.add_server(demo_engine)
        asked = list(zip(PROMPTS, [*ASKED.values()] * 2, strict=False))
        heard: list[None] = []
        with ThreadPoolExecutor(len(asked)) as pool:
            wanted = list(pool.map(lambda each: answer(own.grpc, each[0], each[1], 120), asked))
            one_more = partial(heard.append, None)
            answers = [pool.submit(answer, own.grpc, prompt, parameters, 120, one_more) for prompt, parameters in asked]
            wait_until(lambda: len(heard) > 20 * len(asked), timeout_s=60)
            killed, stopped, _ = sorted(range(3), key=cluster.is_busy, reverse=True)
            cluster.kill(killed)
            cluster.workers[stopped].send_signal(signal.SIGSTOP)
            try:
                found = [each.result() for each in answers]
                wait_until(lambda: "does not answer: " in cluster.said("server0"))
            finally:
                cluster.workers[stopped].send_signal(signal.SIGCONT)
        assert [i for i in range(len(asked)) if found[i] != wanted[i]] == []
        assert "fails over to another worker" in cluster.said("server0")
    finally:
        cluster.close()


def test_without_workers_it_says_so_and_finds_those_that_come(tmp_path: Path, demo_engine: Path) -> None:
    """First the only worker dies. Then the records vanish by which the next one was found; what it streams goes on."""
    cluster = LocalCluster(tmp_path / "cluster", demo_engine, num_workers=1)
    try:
        own = cluster.add_server(demo_engine)
        wanted = answer(own.grpc, PROMPTS[0], {}, 300)
        cluster.kill(0)
        with pytest.raises(InferenceServerException, match=r"no worker of the cluster dynamo\.demo") as error:
            answer(own.grpc, PROMPTS[0], {}, 8)
        assert "start one (llmserve worker ENGINE" in str(error.value)
        assert status_of(own) == httpx.codes.SERVICE_UNAVAILABLE
        cluster.add_worker(demo_engine)
        wait_until(lambda: status_of(own) == httpx.codes.OK, timeout_s=60)
        heard: list[None] = []
        with ThreadPoolExecutor(1) as pool:
            under_way = pool.submit(answer, own.grpc, PROMPTS[0], {}, 300, partial(heard.append, None))
            wait_until(lambda: len(heard) > 20, timeout_s=60)
            shutil.rmtree(cluster.records)
            assert under_way.result() == wanted
        wait_until(lambda: status_of(own) == httpx.codes.SERVICE_UNAVAILABLE, timeout_s=60)
        asked = {"model": "demo", "prompt": "x", "max_tokens": 2}
        wait_until(lambda: httpx.post(f"{cluster.url}/v1/completions", json=asked, timeout=60).status_code == 404)
        cluster.add_worker(demo_engine)
        wait_until(lambda: status_of(own) == httpx.codes.OK, timeout_s=60)
    finally:
        cluster.close()


def status_of(own: Server) -> int:
    """Of a unary answer over HTTP."""
    body = {"text_input": "x", "max_tokens": 2}
    return httpx.post(f"{own.http}/v2/models/ensemble/generate", json=body, timeout=60).status_code
