"""A real engine with LoRA adapters made by PEFT: built, served beside each other, verified, loaded and unloaded."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from llmserve.engine.adapters.sealed import SealedAdapter
from llmserve.engine.cpu.adapters import AdapterPacker
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.directory.gate_record import RECORDS_FILE, every_record
from tests.adapters import make_adapter
from tests.e2e.conftest import CHECKPOINT, ROOT, ServerProcess, llmserve, start_server
from tests.gate_records import add_gate_record

SMOKE = ROOT / "eval/suites/docstrings-smoke.yaml"
TEXT = "Summarize: Open the file and read all of its lines."


@pytest.fixture(scope="module")
def adapters(demo_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, found = tmp_path_factory.mktemp("adapters"), {}
    for seed, name in enumerate(("formal", "brief", "late")):
        make_adapter(folder / name, CHECKPOINT, target_modules=["W_pack", "o_proj", "down_proj"], seed=seed)
        sealed = folder / f"{name}-sealed"
        done = llmserve(
            "adapter", "build", str(folder / name), "--engine", str(demo_engine), "--output-dir", str(sealed)
        )
        assert done.returncode == 0, done.stderr
        found[name] = sealed
    return found


@pytest.fixture(scope="module")
def server(demo_engine: Path, adapters: dict[str, Path]) -> Iterator[ServerProcess]:
    flags = [f"--adapter={name}={adapters[name]}" for name in ("formal", "brief")]
    running = start_server(str(demo_engine), *flags, "--model-control-mode", "explicit", "--load-model", "*")
    yield running
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(timeout=60) == 0


def ask(server: ServerProcess, model: str, **fields: Any) -> Any:
    body = {"model": model, "prompt": TEXT, "max_tokens": 16, "temperature": 0, "ignore_eos": True, **fields}
    reply = httpx.post(f"{server.http}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_answers_are_those_of_the_request_alone(server: ServerProcess) -> None:
    models = ("ensemble", "formal", "brief")
    alone = {model: ask(server, model)["choices"][0]["text"] for model in models}
    assert len(set(alone.values())) == 3
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda model: ask(server, model), models * 8))
    for model, answer in zip(models * 8, together, strict=True):
        assert answer["choices"][0]["text"] == alone[model]


def test_receipts_are_verified_with_the_adapter(
    server: ServerProcess, demo_engine: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    file = tmp_path / "answer.json"
    file.write_text(json.dumps(ask(server, "formal", return_receipt=True)))
    command = ("verify", str(file), "--engine", str(demo_engine))
    done = llmserve(*command, "--adapter", str(adapters["formal"]))
    assert done.returncode == 0, done.stdout + done.stderr
    without = llmserve(*command)
    assert without.returncode == 1
    assert "give its directory with --adapter" in without.stdout


def test_an_adapter_comes_and_goes(server: ServerProcess, adapters: dict[str, Path]) -> None:
    url, name = f"{server.http}/v1", {"lora_name": "late"}
    loaded = httpx.post(f"{url}/load_lora_adapter", json={**name, "lora_path": str(adapters["late"])}, timeout=60)
    digest = SealedAdapter.open(adapters["late"]).digest
    assert loaded.json()["adapter"]["digest"] == digest
    answer = ask(server, "late")
    assert answer["system_fingerprint"].endswith(f"_{digest[:12]}")
    assert f'adapter="late",digest="{digest}"' in httpx.get(server.metrics, timeout=60).text
    assert httpx.post(f"{url}/unload_lora_adapter", json=name, timeout=60).status_code == 200
    gone = httpx.post(f"{url}/completions", json={"model": "late", "prompt": "x"}, timeout=60)
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")


def test_adapters_come_and_go_under_streams(server: ServerProcess, adapters: dict[str, Path]) -> None:
    assert asyncio.run(swapped_under_load(server, adapters, num_rounds=8, num_streams=8)) >= 16


async def swapped_under_load(
    server: ServerProcess, adapters: dict[str, Path], *, num_rounds: int, num_streams: int
) -> int:
    """In each round a name is given another adapter, and a second one comes, answers and goes; the number of answers
    that streams got meanwhile, each of them one adapter's whole text."""
    alone = {model: ask(server, model)["choices"][0]["text"] for model in ("ensemble", "formal", "brief")}
    done, count = asyncio.Event(), 0
    async with httpx.AsyncClient(base_url=f"{server.http}/v1", timeout=60) as client:

        async def call(route: str, **body: Any) -> Any:
            reply = await client.post(f"/{route}", json=body)
            assert reply.status_code == 200, reply.text
            return reply

        async def text(model: str) -> str:
            body = {"prompt": TEXT, "max_tokens": 16, "temperature": 0, "ignore_eos": True, "stream": True}
            lines = (await call("completions", model=model, **body)).text.splitlines()
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            return "".join(event["choices"][0]["text"] for event in events)

        async def stream(number: int) -> None:
            nonlocal count
            while not done.is_set():
                model = ("ensemble", "formal", "brief", "swapped")[(number + count) % 4]
                found = await text(model)
                assert found in ([alone["formal"], alone["brief"]] if model == "swapped" else [alone[model]])
                count += 1

        await call("load_lora_adapter", lora_name="swapped", lora_path=str(adapters["formal"]))
        async with asyncio.TaskGroup() as streams:
            for number in range(num_streams):
                streams.create_task(stream(number))
            for number in range(num_rounds):
                name = ("brief", "formal")[number % 2]
                await call("load_lora_adapter", lora_name="swapped", lora_path=str(adapters[name]))
                assert await text("swapped") == alone[name]
                await call("load_lora_adapter", lora_name="guest", lora_path=str(adapters["late"]))
                assert await text("guest") not in alone.values()
                await call("unload_lora_adapter", lora_name="guest")
            done.set()
        await call("unload_lora_adapter", lora_name="swapped")
    return count


def test_an_adapter_is_rolled_out_to_the_requests_for_its_name(
    server: ServerProcess, adapters: dict[str, Path]
) -> None:
    models = ("ensemble", "formal", "brief")
    alone = {model: ask(server, model)["choices"][0]["text"] for model in models}
    name = {"lora_name": "tried"}
    loaded = {**name, "lora_path": str(adapters["formal"])}
    assert httpx.post(f"{server.http}/v1/load_lora_adapter", json=loaded, timeout=60).status_code == 200
    rules = "--shadow 100% --canary 50% --requests 6 --seconds 0 --min-agreement none --max-latency-ratio none --wait"
    command = ("rollout", "start", "tensorrt_llm", "--adapter", f"tried={adapters['brief']}", *rules.split())
    with ThreadPoolExecutor(5) as pool:
        rollout, found = pool.submit(llmserve, *command, "--url", server.http), set()
        while not rollout.done():
            asked = ("tried", *models)
            for model, answer in zip(asked, pool.map(lambda model: ask(server, model), asked), strict=True):
                text = answer["choices"][0]["text"]
                assert text == alone[model] if model != "tried" else text in (alone["formal"], alone["brief"])
                found |= {text} if model == "tried" else set()
    done = rollout.result()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rollout of tensorrt_llm, adapter tried" in done.stdout
    assert found == {alone["formal"], alone["brief"]}
    assert ask(server, "tried")["choices"][0]["text"] == alone["brief"]
    assert httpx.post(f"{server.http}/v1/unload_lora_adapter", json=name, timeout=60).status_code == 200


@pytest.mark.parametrize("more", [("--engine-process",), ("--frontends", "2", "--max-adapters", "5")], ids=str)
def test_an_engine_in_a_process_of_its_own_has_adapters(
    server: ServerProcess, demo_engine: Path, adapters: dict[str, Path], more: tuple[str, ...]
) -> None:
    models = ("ensemble", "formal", "brief")
    flags = [f"--adapter={name}={adapters[name]}" for name in ("formal", "brief")]
    apart = start_server(str(demo_engine), *flags, *more)
    try:
        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(lambda model: ask(apart, model), models * 2))
        assert [one["choices"] for one in found] == [ask(server, model)["choices"] for model in models] * 2
        (engine,) = (
            each for each in psutil.Process(apart.process.pid).children() if "engine_process" in each.cmdline()[-1]
        )
        engine.kill()
        until(lambda: answers_of(apart, "brief"), lambda texts: texts == {found[2]["choices"][0]["text"]})
    finally:
        apart.process.send_signal(signal.SIGTERM)
        assert apart.process.wait(timeout=60) == 0


def answers_of(server: ServerProcess, model: str) -> set[str]:
    """Nothing while there is no engine."""
    body = {"model": model, "prompt": TEXT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(f"{server.http}/v1/completions", json=body, timeout=60)
    return {reply.json()["choices"][0]["text"]} if reply.status_code == 200 else set()


def test_a_folder_is_polled(demo_engine: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    folder, small = tmp_path / "folder", adapters["brief"]
    folder.mkdir()
    shutil.copytree(adapters["formal"], folder / "formal")
    packed = AdapterPacker(EngineDirectory.open(demo_engine).engine_file).packed(SealedAdapter.open(small))
    room = 3 * packed.num_bytes // 2  # not enough for two
    flags = ("--adapters", str(folder), "--model-control-mode", "poll", "--repository-poll-secs", "1")
    server = start_server(str(demo_engine), *flags, "--adapter-memory", str(room))
    try:
        before = ask(server, "formal")
        shutil.copytree(small, folder / "brief")
        models = until(lambda: known_models(server), lambda names: "brief" in names)
        assert models == {"ensemble", "formal", "brief"}
        assert ask(server, "brief")["choices"] != before["choices"]
        assert ask(server, "formal")["choices"] == before["choices"], "read again, where only one has room"
        shutil.rmtree(folder / "brief")
        until(lambda: known_models(server), lambda names: "brief" not in names)
    finally:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0


def known_models(server: ServerProcess) -> set[str]:
    return {model["id"] for model in httpx.get(f"{server.http}/v1/models", timeout=60).json()["data"]}


def until(look: Callable[[], set[str]], holds: Callable[[set[str]], bool]) -> set[str]:
    deadline = time.monotonic() + 60
    while not holds(found := look()):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def test_an_adapter_is_judged_and_serves_with_its_own_record_only(
    demo_engine: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    output, sealed = tmp_path / "report.json", adapters["formal"]
    engine = shutil.copytree(demo_engine, tmp_path / "engine", ignore=shutil.ignore_patterns(RECORDS_FILE))
    suite = tmp_path / "suite.yaml"  # with its baselines beside it
    data = str(SMOKE.parents[1] / "data")
    text = SMOKE.read_text().replace("num_samples: 50", "num_samples: 6").replace("../baselines", "baselines")
    text = text.replace("margins: {rougeL: 2.0}", "margins: {rougeL: 50}").replace("flip: 0.1", "flip: 5")  # so few
    suite.write_text(text.replace("../data", data) + "inconclusive: pass\n")
    blessed = llmserve("eval", "bless", str(suite), "--by", "ann", "--why", "six samples")
    assert blessed.returncode == 0, blessed.stderr
    command = ("eval", str(engine), "--adapter", str(sealed), "--suite", str(suite), "--output", str(output),
               "--served-samples", "3", "--hf-model-dir", str(CHECKPOINT), "--lora")  # fmt: skip
    assert "give the baseline the same adapter" in llmserve(*command[:-1]).stderr
    assert "was not built from --lora" in llmserve(*command, str(sealed.with_name("brief"))).stderr
    done = llmserve(*command, str(sealed.with_name("formal")))
    assert done.returncode == 0, done.stdout + done.stderr
    report, digest = json.loads(output.read_text()), SealedAdapter.open(sealed).digest
    assert report["engine"]["adapter_digest"] == digest
    assert report["parity"]["exact_match_rate"] > 0.5
    served = report["served"]["conditions"]
    assert {served[name]["verdict"] for name in ("as in this process", "in flight", "/v1 unary", "drawn")} == {"pass"}
    assert every_record(engine) == []
    (record,) = every_record(sealed)
    base = EngineDirectory.open(engine).manifest.engine_digest
    assert (record.engine_digest, record.adapter_digest) == (base, digest)

    add_gate_record(engine, base)  # of a suite that the adapters have not passed
    flags = (f"--adapter=formal={sealed}", "--model-control-mode", "explicit", "--load-model", "*")
    running = start_server(str(engine), *flags, "--require-gate")
    try:
        facts = httpx.get(f"{running.http}/v1/models/formal", timeout=60).json()["adapter"]
        assert [(gate["suite"], gate["passed"]) for gate in facts["gate"]] == [("docstrings-smoke", True)]
        brief = {"lora_name": "brief", "lora_path": str(adapters["brief"])}
        refused = httpx.post(f"{running.http}/v1/load_lora_adapter", json=brief, timeout=60)
        assert refused.status_code >= 400
        assert "no suite has a record for this adapter" in refused.text
    finally:
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(timeout=60) == 0


def test_an_adapter_for_another_engine_keeps_the_server_from_starting(
    demo_engine: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    other = tmp_path / "engine"
    done = llmserve("build", str(CHECKPOINT), "--dtype", "float32", "--output-dir", str(other))
    assert done.returncode == 0, done.stderr
    ports = [flag for name in ("http", "grpc", "metrics") for flag in (f"--{name}-port", "0")]
    done = llmserve("serve", str(other), f"--adapter=a={adapters['formal']}", *ports, "--exit-on-error", timeout=60)
    assert done.returncode != 0
    assert "was built for the engine" in done.stdout + done.stderr
