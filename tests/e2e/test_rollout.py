"""Rollouts of engines in a real server: 32 streams at a time over gRPC and as server-sent events.

Two tiny engines with other weights answer every prompt otherwise, so an answer says who gave it.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import signal
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmserve.client import AsyncClient
from tests.checkpoints import make_checkpoint
from tests.e2e.conftest import ROOT, ServerProcess, llmserve, start_server
from tests.gate_records import add_gate_record

MAX_TOKENS = 24
NUM_STREAMS = 32
PROMPTS = [f"{word} of the file" for word in ("lines", "the end", "a list", "names", "parts", "the rest", "one", "all")]
EXPLICIT = ("--model-control-mode", "explicit", "--load-model", "*", "--max-kv-tokens", "16384")
MODEL = "tensorrt_llm"
ENDS = ("promoted", "rolled_back", "failed")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`a` and `b`, which differ, and `same`, which is `a` once more."""
    folder = tmp_path_factory.mktemp("rollout")
    for name, seed in (("a", 1), ("b", 2)):
        checkpoint = make_checkpoint(folder / f"checkpoint-{name}", "llama", seed=seed)
        done = llmserve("build", str(checkpoint), "--dtype", "float32", "--output-dir", str(folder / name))
        assert done.returncode == 0, done.stderr
    shutil.copytree(folder / "a", folder / "same")
    return {name: folder / name for name in ("a", "b", "same")}


@contextmanager
def serving(*arguments: str) -> Iterator[ServerProcess]:
    server = start_server(*arguments)
    try:
        yield server
    finally:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0


async def over_grpc(client: AsyncClient, prompt: str) -> str:
    deltas = client.generate(prompt, max_tokens=MAX_TOKENS, temperature=0.0)
    return "".join([delta.text async for delta in deltas])


async def over_sse(client: httpx.AsyncClient, prompt: str) -> str:
    body = {"model": "ensemble", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
    texts = []
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                texts.append(event["choices"][0]["text"])
    return "".join(texts)


class Load:
    """32 clients that ask one prompt after the other, half of them over each protocol, until they are told to stop."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.answers: list[tuple[str, str]] = []  # prompt, text
        self.failures: list[BaseException] = []
        self._stopped = False

    async def __aenter__(self) -> Load:
        self._grpc = AsyncClient(self.server.grpc)
        self._http = httpx.AsyncClient(base_url=self.server.http, timeout=120, limits=httpx.Limits(max_connections=64))
        self._tasks = [asyncio.create_task(self._ask(number)) for number in range(NUM_STREAMS)]
        return self

    async def __aexit__(self, *failure: object) -> None:
        self._stopped = True
        await asyncio.gather(*self._tasks)
        await self._grpc.close()
        await self._http.aclose()

    async def _ask(self, number: int) -> None:
        while not self._stopped:
            prompt = PROMPTS[(len(self.answers) + number) % len(PROMPTS)]
            try:
                text = await (over_grpc(self._grpc, prompt) if number % 2 else over_sse(self._http, prompt))
            except Exception as failure:  # each is one too many
                self.failures.append(failure)
                return
            self.answers.append((prompt, text))


async def texts_of(server: ServerProcess) -> dict[str, str]:
    """What the engine that is served answers, each prompt by itself."""
    async with AsyncClient(server.grpc) as client:
        return {prompt: await over_grpc(client, prompt) for prompt in PROMPTS}


def ask(server: ServerProcess, verb: str = "", body: dict[str, Any] | None = None, model: str = MODEL) -> Any:
    url = f"{server.http}/v2/repository/models/{model}/rollout{verb}"
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


async def state_of(server: ServerProcess, *states: str, timeout_s: float = 120) -> dict[str, Any]:
    """The report of the rollout when it is in one of these states."""
    for _ in range(int(timeout_s / 0.1)):
        try:
            report: dict[str, Any] = await asyncio.to_thread(ask, server)
        except urllib.error.HTTPError:  # there is none yet
            report = {"state": ""}
        if report["state"] in states:
            return report
        await asyncio.sleep(0.1)
    raise TimeoutError


def parameters(engine: Path) -> dict[str, str]:
    return {"gpt_model_path": str(engine)}


async def rollout(server: ServerProcess, *arguments: str) -> tuple[int, str]:
    """`llmserve rollout ...` as a user types it."""
    done = await asyncio.to_thread(llmserve, "rollout", *arguments, "--url", server.http)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def expected(engines: dict[str, Path]) -> dict[str, dict[str, str]]:
    found = {}
    for name in ("a", "b"):
        with serving(str(engines[name]), *EXPLICIT) as server:
            found[name] = asyncio.run(texts_of(server))
    assert all(found["a"][prompt] != found["b"][prompt] for prompt in PROMPTS)
    return found


@pytest.fixture(scope="module")
def server(engines: dict[str, Path]) -> Iterator[ServerProcess]:
    with serving(str(engines["a"]), *EXPLICIT) as running:
        yield running


@pytest.fixture
def own_server(engines: dict[str, Path]) -> Iterator[ServerProcess]:
    """For a test that leaves another engine."""
    with serving(str(engines["a"]), *EXPLICIT) as running:
        yield running


def who_answered(load: Load, expected: dict[str, dict[str, str]]) -> Counter[str]:
    """0 failed, 0 mixed."""
    assert load.failures == []
    found = Counter[str]()
    for prompt, text in load.answers:
        names = [name for name in expected if expected[name][prompt] == text]
        assert names, f"{prompt!r} was answered by nobody: {text!r}"
        found[names[0]] += 1
    return found


async def test_a_bad_candidate_is_rolled_back_and_nobody_notices(
    server: ServerProcess, engines: dict[str, Path], expected: dict[str, dict[str, str]]
) -> None:
    async with Load(server) as load:
        code, text = await rollout(server, "start", MODEL, "--engine", str(engines["b"]), "--shadow", "25%", "--wait")
        report = ask(server)
    assert code == 1, text
    assert "rolled_back: " in text
    assert "answers differ, too many for an agreement of 90.00%" in text
    assert who_answered(load, expected).keys() == {"a"}
    assert report["candidate"]["canary"]["succeeded"] == 0
    assert report["stable"]["requests"]["failed"] == 0
    assert report["agreement"]["compared"] < 100


async def test_a_good_candidate_is_promoted_under_load(
    server: ServerProcess, engines: dict[str, Path], expected: dict[str, dict[str, str]]
) -> None:
    rules = shlex.split("--shadow 50% --canary 25%,75% --requests 30 --seconds 1 --max-latency-ratio none --wait")
    async with Load(server) as load:
        code, text = await rollout(server, "start", MODEL, "--engine", str(engines["same"]), *rules)
    assert code == 0, text
    assert text.count("next_step") == 2
    assert who_answered(load, expected).keys() == {"a"}
    report = ask(server)
    assert report["agreement"]["fraction"] == 1.0
    assert report["candidate"]["canary"]["failed"] == report["candidate"]["shadow"]["failed"] == 0
    assert report["latency_ratio"]["first_response"] > 0
    code, text = await rollout(server, "status")
    assert code == 0
    assert "promoted, step 3 of 3" in text


async def test_no_stream_mixes_two_versions(
    own_server: ServerProcess, engines: dict[str, Path], expected: dict[str, dict[str, str]]
) -> None:
    """A rollout to an engine that answers otherwise, all the way: every answer is one engine's as a whole."""
    rules = {
        "shadow": 0, "canary": [0.2, 0.6], "requests": 40, "seconds": 1, "max_latency_ratio": None,
        "promote": "by_hand",
    }  # fmt: skip
    async with Load(own_server) as load:
        await asyncio.to_thread(ask, own_server, "/start", {"parameters": parameters(engines["b"]), "rules": rules})
        await state_of(own_server, "waiting")
        code, text = await rollout(own_server, "promote", MODEL, "--wait")
        assert code == 0, text
        await asyncio.sleep(2)
    found = who_answered(load, expected)
    assert min(found["a"], found["b"]) > NUM_STREAMS
    assert await texts_of(own_server) == expected["b"]
    # and back, taken back in the middle
    async with Load(own_server) as load:
        await asyncio.to_thread(ask, own_server, "/start", {"parameters": parameters(engines["a"]), "rules": rules})
        await asyncio.sleep(1)
        code, text = await rollout(own_server, "abort", MODEL, "--reason", "lunch", "--json")
        assert json.loads(text)[0]["decisions"][-1]["reason"] == "lunch"
        await asyncio.sleep(0.5)
    assert who_answered(load, expected)["b"] > 0
    assert await texts_of(own_server) == expected["b"]


async def test_candidates_that_cannot_be_opened_are_refused(
    server: ServerProcess, engines: dict[str, Path], tmp_path: Path
) -> None:
    before = await texts_of(server)
    code, text = await rollout(server, "start", MODEL, "--engine", str(tmp_path / "nowhere"))
    assert code == 2
    assert "nowhere" in text
    broken = shutil.copytree(engines["a"], tmp_path / "broken")
    (broken / "rank0.engine").write_bytes((broken / "rank0.engine").read_bytes()[:5000])
    code, text = await rollout(server, "start", MODEL, "--engine", str(broken))
    assert code == 2
    assert "rank0.engine" in text
    other = make_checkpoint(tmp_path / "other-tokens", "llama", vocab_size=336)
    assert llmserve("build", str(other), "--dtype", "float32", "--output-dir", str(tmp_path / "other")).returncode == 0
    code, text = await rollout(server, "start", MODEL, "--engine", str(tmp_path / "other"), "--min-agreement", "none")
    assert code == 2
    assert "the candidate's tokenizer.model has different tokens from version" in text
    too_large = {**parameters(engines["a"]), "max_tokens_in_paged_kv_cache": str(10**10)}
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(server, "/start", {"parameters": too_large})
    problem = json.load(caught.value)["error"]
    assert "of memory are left" in problem
    assert "are reserved for the other engine" in problem
    assert "lower max_tokens_in_paged_kv_cache" in problem
    assert ask(server)["state"] == "failed"
    assert await texts_of(server) == before
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{server.http}/v2/health/ready")).status_code == 200


async def test_a_candidate_needs_its_own_record_where_engines_do(engines: dict[str, Path], tmp_path: Path) -> None:
    gated = shutil.copytree(engines["a"], tmp_path / "gated")
    add_gate_record(gated, json.loads((gated / "manifest.json").read_text())["engine_digest"])
    with serving(str(gated), *EXPLICIT, "--require-gate", "docs") as server:
        code, text = await rollout(server, "start", MODEL, "--engine", str(engines["b"]))
        assert code == 2
        assert "suite docs has no complete record for its digest" in text
        assert (await rollout(server, "start", MODEL, "--engine", str(gated)))[0] == 0


def write_repository(path: Path, engine: Path, rules: dict[str, Any]) -> Path:
    """The shipped pipelines, with rules, and with engines as versions of `tensorrt_llm`."""
    shutil.copytree(ROOT / "pipelines", path)
    config = path / MODEL / "config.pbtxt"
    lines = [line for line in config.read_text().splitlines() if "gpt_model_path" not in line]
    parameter = f"parameters {{ key: 'rollout' value: {{ string_value: '{json.dumps(rules)}' }} }}"
    config.write_text("\n".join([*lines, parameter]))
    shutil.rmtree(path / MODEL / "1")
    shutil.copytree(engine, path / MODEL / "1")
    return path


def add_version(repository: Path, number: int, engine: Path) -> None:
    """At once, as it should be done."""
    shutil.copytree(engine, repository / "coming")
    (repository / "coming").rename(repository / MODEL / str(number))


async def test_versions_that_appear_in_a_repository_are_rolled_out(
    engines: dict[str, Path], expected: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    """Also by a server that was killed in the middle: the stable version answers, and the rollout begins anew."""
    rules = {"shadow": "50%", "canary": ["50%"], "requests": 20, "seconds": 1, "max_latency_ratio": None}
    (tmp_path / "models").mkdir()
    repository = write_repository(tmp_path / "models/repository", engines["a"], rules)
    tokenizers = [f"--parameter={step}.tokenizer_dir={engines['a']}" for step in ("preprocessing", "postprocessing")]
    polling = ("--model-repository", str(repository), "--model-control-mode", "poll", "--repository-poll-secs", "1")
    arguments = (*polling, *tokenizers, f"--parameter={MODEL}.max_tokens_in_paged_kv_cache=16384")
    with serving(*arguments) as first:
        assert await texts_of(first) == expected["a"]
        add_version(repository, 2, engines["b"])
        async with Load(first) as load:
            assert (await state_of(first, *ENDS))["state"] == "rolled_back"
        assert who_answered(load, expected).keys() == {"a"}
        await asyncio.sleep(3)  # polls
        assert len(ask(first)["decisions"]) == 2
        assert await texts_of(first) == expected["a"]

    add_version(repository, 3, engines["same"])
    killed = start_server(*arguments)
    await state_of(killed, "shadow")
    killed.process.kill()
    killed.process.wait()
    with serving(*arguments) as second:
        assert await texts_of(second) == expected["a"]
        async with Load(second) as load:
            report = await state_of(second, *ENDS)
        assert report["state"] == "promoted"
        assert (report["stable_version"], report["candidate_version"]) == ("1", "3")
        assert who_answered(load, expected).keys() == {"a"}
