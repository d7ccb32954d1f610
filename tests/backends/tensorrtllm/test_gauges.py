"""What `/metrics` tells of an engine beside Triton's gauges."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from llmserve.backends.tensorrtllm import TensorrtLlmBackend
from llmserve.backends.tensorrtllm.backend import EngineInstance
from llmserve.backends.tensorrtllm.gauges import engine_facts, engine_gauges
from llmserve.engine.base import EngineStats, StepResult
from llmserve.engine.directory.artifact import ENGINE_FILE
from llmserve.engine.fake import fake_engine
from llmserve.engine.fake.runner import FakeRunner
from llmserve.scheduler.plan import StepPlan
from llmserve.serving.backend import LoadContext
from tests.backends.tensorrtllm.models import load_model, no_infer, read_config, request, responses, with_parameters
from tests.engine.directories import make_engine_directory
from tests.gate_records import record_of

INTACT = "llmserve_engine_files_intact"
PROMPT = [1, 2, 3]


async def test_metrics_tell_the_engine_and_count_tokens_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step begins before the answer's piece of the one before it has been read."""
    permits, step = threading.Semaphore(1), FakeRunner.step

    def permitted(runner: FakeRunner, plan: StepPlan) -> StepResult:
        assert permits.acquire(timeout=20)
        return step(runner, plan)

    monkeypatch.setattr(FakeRunner, "step", permitted)
    engine = fake_engine()
    model = load_model(engine)

    def counts() -> list[float]:
        samples = {family: number for family, _, number in model.gauges()}
        return [samples[f"llmserve_{kind}_tokens_total"] for kind in ("prompt", "generation")]

    (facts,) = [labels for family, labels, _ in model.gauges() if family == "llmserve_engine_info"]
    assert (facts["target"], facts["digest"]) == (engine.info.target, engine.info.digest)
    assert counts() == [0, 0]
    (instance,) = model.instances
    (stream,) = instance.execute([request(PROMPT, streaming=True)])
    seen = []
    async for _ in stream:
        seen.append(counts())
        permits.release()
    permits.release(100)
    assert seen[-1] == [3, 5]
    assert seen == sorted(seen)
    assert len({tuple(each) for each in seen}) > 1  # not only when the answer has ended
    await responses(instance, request(PROMPT))  # type: ignore[arg-type]
    assert counts()[1] == 10
    engine.close()


def test_what_an_engine_does_not_count_is_not_told() -> None:
    info = (engine := fake_engine()).info
    engine.close()
    lost = engine_facts(info, EngineStats(num_failed_replicas=2), ())
    assert [family for family, _, _ in lost] == [
        "llmserve_engine_info", "llmserve_engine_failed_replicas", "llmserve_engine_restarts_total",
    ]  # fmt: skip
    assert lost[1] == ("llmserve_engine_failed_replicas", {}, 2.0)
    told = engine_facts(info, EngineStats(), [record_of("one", passed=False)])
    assert ("llmserve_engine_gate", {"suite": "one", "verdict": "fail"}, 0.0) in told


async def test_an_engine_whose_file_was_changed_is_not_ready(tmp_path: Path) -> None:
    path = make_engine_directory(tmp_path / "engine")
    config = with_parameters(read_config("tensorrt_llm"), gpt_model_path=str(path))
    backend = TensorrtLlmBackend(lambda path, settings: fake_engine(), verify_every_s=0.001)
    model = backend.load(LoadContext(config, path, "1", path, no_infer))
    (instance,) = model.instances
    assert isinstance(instance, EngineInstance)
    assert instance.watch is not None
    assert instance.healthy()
    assert (INTACT, {}, 1.0) in model.gauges()
    (path / ENGINE_FILE).write_bytes(b"another")
    instance.watch.wait()
    assert not instance.healthy()
    assert (INTACT, {}, 0.0) in model.gauges()
    await instance.close()


def test_slots_for_states_are_told_where_there_are_some() -> None:
    def told(stats: EngineStats) -> dict[str, float]:
        family = "llmserve_sequence_states"
        return {labels["state_type"]: value for name, labels, value in engine_gauges(stats) if name == family}

    assert told(EngineStats(max_num_states=9, free_num_states=7)) == {"max": 9, "free": 7, "used": 2}
    assert told(EngineStats()) == {}
