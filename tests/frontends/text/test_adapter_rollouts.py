"""Rollouts of one adapter in a real server: what clients of its name, of the base and of other adapters get."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from llmserve.cli.app import app
from llmserve.core import GenerateRequest
from llmserve.engine.adapters.sealed import SealedAdapter
from llmserve.engine.fake import FakeRunner, fake_engine
from llmserve.engine.inflight import InflightEngine
from llmserve.errors import InternalError
from llmserve.serving.settings import ControlMode
from llmserve.stages.tokenizer import Tokenizer
from tests.engine.test_adapters import adapters
from tests.frontends.server import RunningServer
from tests.frontends.text.conftest import LIMITS, serving
from tests.frontends.text.test_adapters import PROMPT, text_of

ROLLOUT = "/v2/repository/models/tensorrt_llm/rollout"
QUICK = {"requests": 5, "seconds": 0, "max_latency_ratio": None, "min_agreement": None}
ALL_CANARY = {"shadow": 0, "canary": [1.0], "requests": 1000, "seconds": 0, "max_latency_ratio": None}
ENDS = ("promoted", "rolled_back", "failed")


class Engine(InflightEngine):
    """Answers with every adapter but one."""

    def __init__(self, broken: str) -> None:
        super().__init__(FakeRunner(LIMITS), fake_engine().info)
        self._broken = broken

    def submit(self, request: GenerateRequest) -> Any:
        if request.adapter == self._broken:
            raise InternalError("boom")
        return super().submit(request)


@dataclass
class Adapted:
    """A server with the adapters `formal`, `brief` and `7`, and others that it does not know yet."""

    server: RunningServer
    http: httpx.Client
    known: list[SealedAdapter]
    texts: dict[str, str]  # by digest, "" the base: the whole answer to PROMPT

    @property
    def formal(self) -> SealedAdapter:
        return self.known[0]

    @property
    def tried(self) -> SealedAdapter:
        return self.known[3]

    @property
    def broken(self) -> SealedAdapter:
        return self.known[4]

    def ask(self, model: str = "formal", **fields: Any) -> str:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **fields}
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def stream(self, model: str) -> str:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "stream": True}
        lines = self.http.post("/v1/completions", json=body).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        return "".join(event["choices"][0]["text"] for event in events)

    def generate(self, **fields: Any) -> str:
        body = {"text_input": PROMPT, "max_tokens": 8, "exclude_input_in_output": True, **fields}
        return str(self.http.post("/v2/models/ensemble/generate", json=body).json()["text_output"])

    def load(self, name: str, adapter: SealedAdapter) -> None:
        loaded = self.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(adapter.path)})
        assert loaded.status_code == 200, loaded.text

    def start(self, name: str, adapter: SealedAdapter | Path, rules: dict[str, Any]) -> dict[str, Any]:
        path = adapter if isinstance(adapter, Path) else adapter.path
        answer = self.http.post(f"{ROLLOUT}/start", json={"adapter": {"name": name, "path": str(path)}, "rules": rules})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def report(self) -> dict[str, Any]:
        return dict(self.http.get(ROLLOUT).json())

    def end(self, *models: str) -> tuple[dict[str, Any], Counter[str]]:
        """Ask models until the rollout has ended: its report, and how often `formal` was answered with which text."""
        found = Counter[str]()
        for _ in range(1000):
            if (report := self.report())["state"] in ENDS:
                return report, found
            found[self.ask()] += 1
            for model in models:
                assert self.ask(model) == self.texts[self.digest(model)]
        raise TimeoutError

    def digest(self, model: str) -> str:
        return {"ensemble": "", "brief": self.known[1].digest, "7": self.known[2].digest}[model]


@pytest.fixture(scope="module")
def running(text_dir: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    known = adapters(tmp_path_factory.mktemp("adapters"), 5)
    given = json.dumps({name: str(each.path) for name, each in zip(("formal", "brief", "7"), known, strict=False)})
    made = serving(
        text_dir,
        engine={"adapters": given},
        control_mode=ControlMode.EXPLICIT,
        open_engine=lambda: Engine(known[4].digest),
    )
    with made as server, httpx.Client(base_url=server.http_url, timeout=60) as http:
        ids = http.post("/tokenize", json={"model": "ensemble", "prompt": PROMPT}).json()["tokens"]
        texts = {digest: text_of(tokenizer, ids, digest) for digest in ("", *(each.digest for each in known))}
        assert len(set(texts.values())) == len(texts)
        yield Adapted(server, http, known, texts)


@pytest.fixture
def adapted(running: Adapted) -> Iterator[Adapted]:
    """With `formal` as at the start."""
    running.load("formal", running.formal)
    yield running
    if running.http.get(ROLLOUT).json().get("state", "failed") not in ENDS:
        running.http.post(f"{ROLLOUT}/abort")


def test_a_good_one_is_promoted_and_other_requests_are_not_touched(adapted: Adapted) -> None:
    begun = adapted.start("formal", adapted.tried, {**QUICK, "shadow": 1, "canary": [0.5]})
    assert begun["adapter"] == {
        "name": "formal", "path": str(adapted.tried.path), "stable_digest": adapted.formal.digest,
        "candidate_digest": adapted.tried.digest,
    }  # fmt: skip
    assert adapted.http.get("/v1/models/formal").json()["adapter"]["digest"] == adapted.formal.digest
    assert [each["id"] for each in adapted.http.get("/v1/models").json()["data"]] == [
        "ensemble",
        "7",
        "brief",
        "formal",
    ]
    report, found = adapted.end("ensemble", "brief", "7")
    assert [each["what"] for each in report["decisions"]] == ["started", "next_step", "promoted"]
    assert found.keys() == {adapted.texts[adapted.formal.digest], adapted.texts[adapted.tried.digest]}
    canary, stable = report["candidate"]["canary"], report["stable"]["requests"]
    assert canary["succeeded"] == found[adapted.texts[adapted.tried.digest]] >= 5
    assert stable["succeeded"] == found[adapted.texts[adapted.formal.digest]]
    copies = report["candidate"]["shadow"]
    assert 5 <= copies["succeeded"] + copies["not_copied"] <= stable["succeeded"]
    assert adapted.ask() == adapted.stream("formal") == adapted.texts[adapted.tried.digest]
    assert adapted.http.get("/v1/models/formal").json()["adapter"]["digest"] == adapted.tried.digest


def test_one_that_answers_otherwise_breaks_the_rule_of_agreement(adapted: Adapted) -> None:
    adapted.start("formal", adapted.tried, {"shadow": 1})
    report, found = adapted.end()
    assert report["state"] == "rolled_back"
    assert "answers differ, too many for an agreement of 90.00%" in report["decisions"][-1]["reason"]
    assert found.keys() == {adapted.texts[adapted.formal.digest]}
    assert adapted.ask() == adapted.texts[adapted.formal.digest]


def test_one_that_fails_is_rolled_back_and_nobody_notices(adapted: Adapted) -> None:
    adapted.start("formal", adapted.broken, ALL_CANARY)
    report, found = adapted.end("ensemble", "brief")
    assert report["state"] == "rolled_back"
    assert "boom" in report["decisions"][-1]["reason"]
    assert report["candidate"]["canary"]["rescued"] >= 2
    assert found.keys() == {adapted.texts[adapted.formal.digest]}


def test_whatever_names_it_reaches_it(adapted: Adapted) -> None:
    """A model of /v1, `lora_name`, and TensorRT-LLM's number."""
    adapted.start("formal", adapted.tried, ALL_CANARY)
    tried = adapted.texts[adapted.tried.digest]
    assert [adapted.ask(), adapted.stream("formal"), adapted.generate(lora_name="formal")] == [tried] * 3
    assert adapted.report()["candidate"]["canary"]["succeeded"] == 3
    for model, fields in (("ensemble", {}), ("7", {"lora_task_id": 7}), ("brief", {"lora_name": "brief"})):
        assert adapted.generate(**fields) == adapted.texts[adapted.digest(model)]
    sent = {"model": "formal", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_receipt": True}
    (choice,) = adapted.http.post("/v1/completions", json=sent).json()["choices"]
    assert choice["receipt"]["adapter"] == adapted.tried.digest
    assert adapted.http.post(f"{ROLLOUT}/abort", json={}).json()["state"] == "rolled_back"
    assert adapted.generate(lora_name="formal") == adapted.texts[adapted.formal.digest]
    adapted.start("7", adapted.tried, ALL_CANARY)
    assert adapted.generate(lora_task_id=7) == adapted.generate(lora_name="7") == tried
    assert adapted.ask() == adapted.texts[adapted.formal.digest]


def test_no_answer_mixes_both(adapted: Adapted) -> None:
    adapted.start("formal", adapted.tried, {**ALL_CANARY, "canary": [0.5], "promote": "by_hand"})
    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(adapted.stream, "formal") for _ in range(60)]
        base = [pool.submit(adapted.stream, "ensemble") for _ in range(20)]
        assert adapted.http.post(f"{ROLLOUT}/promote", json={}).json()["state"] == "promoted"
        found = Counter(stream.result() for stream in streams)
        assert {stream.result() for stream in base} == {adapted.texts[""]}
    assert found.keys() <= {adapted.texts[adapted.formal.digest], adapted.texts[adapted.tried.digest]}
    assert adapted.ask() == adapted.texts[adapted.tried.digest]


@pytest.mark.parametrize("change", ["load", "unload"])
def test_a_load_or_unload_of_the_name_in_between_ends_it(adapted: Adapted, change: str) -> None:
    adapted.start("formal", adapted.tried, ALL_CANARY)
    adapted.load("brief", adapted.known[1])
    assert adapted.report()["state"] == "canary"
    if change == "load":
        adapted.load("formal", adapted.known[2])
        assert adapted.ask() == adapted.texts[adapted.known[2].digest]
    else:
        adapted.http.post("/v1/unload_lora_adapter", json={"lora_name": "formal"})
        assert adapted.http.post("/v1/completions", json={"model": "formal", "prompt": PROMPT}).status_code == 404
    assert adapted.report()["decisions"][-1]["reason"] == "adapter 'formal' was reloaded or unloaded in the meantime"


def test_an_unload_of_the_model_ends_it(adapted: Adapted) -> None:
    adapted.start("formal", adapted.tried, ALL_CANARY)
    assert adapted.http.post("/v2/repository/models/tensorrt_llm/unload", json={}).status_code == 200
    assert adapted.report()["state"] == "rolled_back"
    assert adapted.http.post("/v2/repository/models/ensemble/load", json={}).status_code == 200
    assert adapted.ask() == adapted.texts[adapted.formal.digest]


def test_metrics_say_which_adapter(adapted: Adapted) -> None:
    adapted.start("formal", adapted.tried, ALL_CANARY)
    adapted.ask()
    text = adapted.server.core.metrics_text()
    labels = 'adapter="formal",model="tensorrt_llm"'
    assert f'llmserve_rollout_state{{{labels},state="canary",version="1"}} 1' in text
    asked = f'adapter="formal",digest="{adapted.tried.digest}",model="tensorrt_llm",version="1"'
    assert f"llmserve_adapter_requests_total{{{asked}}} 1" in text
    samples = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(samples) == len(set(samples)), "nothing is told twice"


def test_what_cannot_be_rolled_out_is_refused(adapted: Adapted, tmp_path: Path) -> None:
    def refused(adapter: dict[str, str], model: str = "tensorrt_llm", **more: Any) -> str:
        url = f"/v2/repository/models/{model}/rollout/start"
        answer = adapted.http.post(url, json={"adapter": adapter, **more})
        assert answer.status_code >= 400
        return str(answer.json()["error"])

    tried = {"name": "formal", "path": str(adapted.tried.path)}
    assert "there is no adapter 'formel'; did you mean 'formal'" in refused({**tried, "name": "formel"})
    assert "is not an adapter directory" in refused({**tried, "path": str(tmp_path)})
    damaged = shutil.copytree(adapted.tried.path, tmp_path / "damaged")
    (damaged / "weights.bin").write_bytes(b"x")
    assert "weights.bin" in refused({**tried, "path": str(damaged)})
    assert "'formal' is the adapter in" in refused({**tried, "path": str(adapted.formal.path)})
    assert "model 'preprocessing' does not support adapters" in refused(tried, "preprocessing")
    assert "'ensemble' is an ensemble; roll out the model of one of its steps" in refused(tried, "ensemble")
    assert "leave out version and parameters" in refused(tried, version="2")
    assert "unknown rule 'x'" in refused(tried, rules={"x": 1})
    assert adapted.ask() == adapted.texts[adapted.formal.digest]
    adapted.start("formal", adapted.tried, ALL_CANARY)
    assert "a rollout of model 'tensorrt_llm' is in progress" in refused(tried)


def test_where_nothing_may_change_nothing_does(text_dir: Path, running: Adapted) -> None:
    with serving(text_dir, control_mode=ControlMode.POLL) as server:
        body = {"adapter": {"name": "formal", "path": str(running.tried.path)}}
        answer = httpx.post(f"{server.http_url}{ROLLOUT}/start", json=body, timeout=60)
        assert "rollouts of an adapter need --model-control-mode explicit" in answer.json()["error"]


def test_the_command_line(adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    def command(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["rollout", *arguments, "--url", adapted.server.http])

    monkeypatch.chdir(adapted.tried.path.parent)
    rules = ("--canary", "100%", "--shadow", "0", "--min-agreement", "none", "--max-latency-ratio", "none", "--by-hand")
    begun = command("start", "tensorrt_llm", "--adapter", f"formal={adapted.tried.path.name}", *rules)
    assert begun.exit_code == 0, begun.output
    lines = begun.output.splitlines()
    assert lines[0] == "rollout of tensorrt_llm, adapter formal"
    assert f"  stable     digest {adapted.formal.digest[:12]}: 0 answered, 0 failed" in lines
    assert f"  made with  {adapted.tried.path}" in lines
    assert adapted.ask() == adapted.texts[adapted.tried.digest]
    assert command("promote", "tensorrt_llm", "--wait").exit_code == 0
    assert adapted.ask() == adapted.texts[adapted.tried.digest]
