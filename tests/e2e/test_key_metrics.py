"""What `/metrics` says of each API key, after real clients of every protocol have asked a real server process."""

from __future__ import annotations

import queue
import re
import signal
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.e2e.conftest import ServerProcess, start_server
from tests.e2e.test_streaming import client_inputs, tensor, wait_for_idle
from tests.frontends.server import wait_until

TEAM, FEW, METERED = "team-0123456789abcdef", "few-0123456789abcdef", "metered-0123456789abcdef"
ENTRIES = {
    "team": f"{{name: team, key: {TEAM}}}",
    "few": f"{{name: few, key: {FEW}, max_answers: 1}}",
    "metered": f"{{name: metered, key: {METERED}, tokens_per_minute: 2}}",
}
MODEL = "ensemble"
REQUESTS, REFUSALS = "llmserve_key_requests_total", "llmserve_key_refusals_total"
GENERATED = "llmserve_key_generation_tokens_total"
MESSAGES: Any = [{"role": "user", "content": "Summarize: The connection is closed. Any pending data is sent before."}]
SAMPLE = re.compile(r"(\w+)\{(.*)\} (\S+)")
Samples = dict[tuple[str, frozenset[str]], float]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def write(keys: Path, *names: str) -> None:
    keys.write_text("keys:\n" + "".join(f"- {ENTRIES[name]}\n" for name in names))


@pytest.fixture
def locked(demo_engine: Path, keys: Path) -> Iterator[ServerProcess]:
    write(keys, *ENTRIES)
    server = start_server(str(demo_engine), "--api-keys", str(keys))
    yield server
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=60) == 0


def samples(server: ServerProcess) -> Samples:
    text = urllib.request.urlopen(server.metrics, timeout=10).read().decode()
    found = [(name, frozenset(labels.split(",")), float(value)) for name, labels, value in SAMPLE.findall(text)]
    assert len({(name, labels) for name, labels, _ in found}) == len(found), "a sample is there twice"
    return {(name, labels): value for name, labels, value in found}


def total(found: Samples, family: str, *labels: str) -> float:
    return sum(value for (name, given), value in found.items() if name == family and given >= set(labels))


def ended(found: Samples) -> Counter[tuple[str, str]]:
    """Requests by key, and by outcome or limit."""
    count: Counter[tuple[str, str]] = Counter()
    for (name, labels), value in found.items():
        if name in (REQUESTS, REFUSALS) and value:
            named = dict(label.split("=") for label in labels)
            assert named["model"] == f'"{MODEL}"'
            how = named["outcome" if name == REQUESTS else "limit"]
            count[named["key"].strip('"'), how.strip('"')] += int(value)
    return count


def in_flight(found: Samples) -> float:
    return total(found, "llmserve_key_requests_in_flight")


def ask(server: ServerProcess, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.http}/v1", api_key=key, max_retries=0)


def over_grpc(server: ServerProcess, key: str, *more: triton.InferInput) -> None:
    """One streaming request; raises its error."""
    results: list[Any] = []
    with triton.InferenceServerClient(server.grpc) as client:
        client.start_stream(
            lambda result, error: results.append(error or result), headers={"authorization": f"Bearer {key}"}
        )
        client.async_stream_infer(MODEL, [*client_inputs("Summarize: x", max_tokens=3), *more])
        client.stop_stream()
    assert results
    for each in results:
        if isinstance(each, Exception):
            raise each


def ask_in_every_way(server: ServerProcess, key: str) -> int:
    """How many requests that was."""
    with ask(server, key) as client:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=3)
        list(client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=3, stream=True))
        client.completions.create(model=MODEL, prompt=["x", "y"], max_tokens=2)  # a request for each prompt
        client.responses.create(model=MODEL, input="x", max_output_tokens=16)
    with anthropic.Anthropic(base_url=server.http, api_key=key, max_retries=0) as client:
        client.messages.create(model=MODEL, max_tokens=3, messages=MESSAGES)
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=server.http, headers=headers, timeout=60) as client:
        for path, body in (
            ("/api/chat", {"model": MODEL, "messages": MESSAGES, "options": {"num_predict": 3}}),
            (f"/v2/models/{MODEL}/generate", {"text_input": "x", "max_tokens": 3}),
            (f"/v2/models/{MODEL}/generate_stream", {"text_input": "x", "max_tokens": 3, "stream": True}),
        ):
            assert client.post(path, json=body).status_code == 200
    over_grpc(server, key)
    return 10


def assert_sums_are_the_models(found: Samples) -> None:
    model = f'model="{MODEL}"'
    failures = total(found, "nv_inference_request_failure", model)
    succeeded = total(found, REQUESTS, model, 'outcome="succeeded"')
    ended = total(found, REQUESTS, model)
    assert succeeded == total(found, "nv_inference_request_success", model)
    assert ended - succeeded + total(found, REFUSALS, model, 'limit="server"') == failures


def test_each_request_counts_once_and_all_keys_together_are_the_model(locked: ServerProcess) -> None:
    count = ask_in_every_way(locked, TEAM)
    with ask(locked, FEW) as client:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=3)
        with pytest.raises(openai.BadRequestError, match="answers running at once"):
            client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=3, n=2, temperature=1)
    with pytest.raises(InferenceServerException, match="answers running at once"):
        over_grpc(locked, FEW, tensor("num_return_sequences", 2, np.int32))
    with ask(locked, METERED) as client:
        client.completions.create(model=MODEL, prompt="x", max_tokens=3)
        with pytest.raises(openai.RateLimitError, match="tokens per minute"):
            client.completions.create(model=MODEL, prompt="x", max_tokens=3)
    with pytest.raises(InferenceServerException, match="tokens per minute"):
        over_grpc(locked, METERED)
    with pytest.raises(InferenceServerException, match="num_return_sequences"):
        over_grpc(locked, TEAM, tensor("num_return_sequences", 0, np.int32))
    wait_for_idle(locked)
    found = samples(locked)
    assert ended(found) == {
        ("team", "succeeded"): count, ("team", "failed"): 1,
        ("few", "succeeded"): 1, ("few", "failed"): 2,
        ("metered", "succeeded"): 1, ("metered", "tokens_per_minute"): 2,
    }  # fmt: skip
    assert_sums_are_the_models(found)
    for kind in ("prompt", "generation"):
        of_keys = total(found, f"llmserve_key_{kind}_tokens_total")
        assert of_keys == total(found, f"llmserve_request_{kind}_tokens_sum") > 0
    for part in ("count", "sum"):
        of_model = total(found, f"llmserve_request_queue_time_seconds_{part}")
        assert total(found, f"llmserve_key_queue_time_seconds_{part}") == pytest.approx(of_model)
    assert in_flight(found) == 0


def test_what_a_client_gives_up_is_in_flight_before_and_cancelled_afterwards(locked: ServerProcess) -> None:
    before = samples(locked)
    body = {"model": MODEL, "prompt": "x", "max_tokens": None, "ignore_eos": True, "stream": True}
    headers = {"authorization": f"Bearer {TEAM}"}
    with (
        httpx.Client(headers=headers) as client,
        client.stream("POST", f"{locked.http}/v1/completions", json=body) as answer,
    ):
        pieces = answer.iter_raw()
        next(pieces)
        assert in_flight(samples(locked)) == 1
    with triton.InferenceServerClient(locked.grpc) as grpc:
        results: queue.Queue[Any] = queue.Queue()
        grpc.start_stream(lambda result, error: results.put(error or result), headers=headers)
        grpc.async_stream_infer(MODEL, [*client_inputs("x", max_tokens=450), tensor("end_id", -1, np.int32)])
        assert not isinstance(results.get(timeout=60), Exception)
        grpc.stop_stream(cancel_requests=True)
    wait_for_idle(locked)
    wait_until(lambda: in_flight(samples(locked)) == 0)
    found = samples(locked)
    assert ended(found) - ended(before) == {("team", "cancelled"): 2}
    assert_sums_are_the_models(found)
    made = total(found, GENERATED) - total(before, GENERATED)
    sampled = total(found, "llmserve_generation_tokens_total") - total(before, "llmserve_generation_tokens_total")
    assert 2 <= made <= sampled < 2 * 449


def test_a_name_that_is_gone_is_not_shown_and_the_others_go_on(locked: ServerProcess, keys: Path) -> None:
    with ask(locked, FEW) as client:
        client.completions.create(model=MODEL, prompt="x", max_tokens=3)
    wait_until(lambda: total(samples(locked), REQUESTS, 'key="few"') > 0)
    wait_for_idle(locked)
    before = samples(locked)
    write(keys, "team", "metered")
    wait_until(lambda: not total(samples(locked), REQUESTS, 'key="few"'))
    found = samples(locked)
    assert not any('key="few"' in labels for _, labels in found)
    assert ended(found) == Counter({which: n for which, n in ended(before).items() if which[0] != "few"})
    with ask(locked, TEAM) as client:
        client.completions.create(model=MODEL, prompt="x", max_tokens=3)
    wait_until(lambda: ended(samples(locked)) - ended(found) == {("team", "succeeded"): 1})


def test_anonymous_requests_are_no_keys(server: ServerProcess) -> None:
    with ask(server, "none") as client:
        client.completions.create(model=MODEL, prompt="x", max_tokens=3)
    assert not any(name.startswith("llmserve_key_") for name, _ in samples(server))
