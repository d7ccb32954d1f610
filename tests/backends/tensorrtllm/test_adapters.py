"""Adapters of a `tensorrt_llm` model: names, which requests keep what they have found, and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmserve.core import GenerateRequest, SamplingParams
from llmserve.engine.adapters.sealed import SealedAdapter
from llmserve.engine.base import Engine
from llmserve.engine.directory.gate_record import GateRule
from llmserve.engine.fake import fake_answer, fake_engine
from llmserve.engine.fake.runner import KERNELS
from llmserve.engine.inflight import InflightEngine
from llmserve.errors import Code, EngineFileError, GateClosed, InvalidArgument, ModelConfigError, NotFound, Unsupported
from llmserve.serving.types import InferRequest, Tensor
from tests.backends.tensorrtllm.models import ids, instance_over, load_model, request, responses, value
from tests.engine.test_adapters import adapters
from tests.gate_records import add_gate_record
from tests.sealed_adapters import random_parts, sealed

PROMPT = [11, 12, 13, 14, 15]


@pytest.fixture
def known(tmp_path: Path) -> list[SealedAdapter]:
    return adapters(tmp_path, 3)


@pytest.fixture
def engine() -> Iterator[InflightEngine]:
    made = fake_engine()
    yield made
    made.close()


def named(name: str, num_tokens: int = 5, **inputs: Any) -> InferRequest:
    asked = request(PROMPT, request_output_len=num_tokens, **inputs)
    return InferRequest("tensorrt_llm", asked.inputs, model_version="1", parameters={"lora_name": name})


def directories(**given: SealedAdapter) -> str:
    return json.dumps({name: str(adapter.path) for name, adapter in given.items()})


async def test_requests_choose_by_name_or_by_tensorrt_llms_number(
    engine: InflightEngine, known: list[SealedAdapter]
) -> None:
    instance = instance_over(engine, adapters=json.dumps({"style": str(known[0].path), "7": str(known[1].path)}))
    for asked, adapter in (
        (named("style"), known[0]),
        (named("7"), known[1]),
        (request(PROMPT, lora_task_id=7), known[1]),
        (named("7", lora_task_id=7), known[1]),
    ):
        (answer,) = await responses(instance, asked)
        assert ids(answer) == fake_answer(PROMPT, 5, adapter=adapter.digest)
        assert answer.output("warning") is None, "the parameter is not told to be ignored"
    (answer,) = await responses(instance, request(PROMPT))
    assert ids(answer) == fake_answer(PROMPT, 5)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (named("stile"), "there is no adapter 'stile'; did you mean 'style'?"),
        (request(PROMPT, lora_task_id=8), "there is no adapter '8'"),
        (named("style", lora_task_id=7), "lora_task_id must be one number"),
        (InferRequest("tensorrt_llm", {}, parameters={"lora_name": 7}), "lora_name must be a string"),
    ],
)
async def test_unknown_adapters_are_invalid(
    asked: InferRequest, words: str, engine: InflightEngine, known: list[SealedAdapter]
) -> None:
    instance = instance_over(engine, adapters=directories(style=known[0]))
    (answer,) = await responses(instance, asked)
    assert answer.error is not None
    assert answer.error.code is Code.INVALID_ARGUMENT
    assert words in str(answer.error)


async def test_a_name_that_is_loaded_again_is_another_adapter(known: list[SealedAdapter]) -> None:
    engine = fake_engine(step_delay_s=0.002)
    loaded = load_model(engine, adapters=directories(style=known[0]))
    (instance,), served = loaded.instances, loaded.adapters
    assert served is not None
    (stream,) = instance.execute([named("style", 40, streaming=True)])
    async with aclosing(stream) as begun:
        found = ids(await anext(begun))
        served.load("style", known[1].path)
        (answer,) = [one async for one in instance.execute([named("style")])[0]]
        assert ids(answer) == fake_answer(PROMPT, 5, adapter=known[1].digest)
        served.unload("style")
        async for one in begun:
            found += ids(one)
    assert found == fake_answer(PROMPT, 40, adapter=known[0].digest)
    with pytest.raises(InvalidArgument, match="there is no adapter 'style'"):
        served.unload("style")
    engine.close()


async def test_a_request_that_waits_keeps_what_its_name_was(known: list[SealedAdapter]) -> None:
    """Between the moment when a request is read and its first step the name may become another's."""
    engine = fake_engine()
    served = load_model(engine, adapters=directories(style=known[0])).adapters
    assert served is not None
    with served.held("style") as digest:  # type: ignore[attr-defined]
        served.load("style", known[1].path)
        generate = engine.submit(_generate(digest))
        found = [token async for event in generate for token in event.token_ids]
    assert found == fake_answer(PROMPT, 5, adapter=known[0].digest)
    with pytest.raises(InvalidArgument, match="the engine has no adapter"):
        engine.submit(_generate(known[0].digest))
    engine.close()


async def test_a_candidate_is_for_requests_that_want_it_until_it_has_the_name(known: list[SealedAdapter]) -> None:
    engine = fake_engine(step_delay_s=0.002)
    loaded = load_model(engine, adapters=directories(style=known[0]))
    (instance,), served = loaded.instances, loaded.adapters
    assert served is not None
    stable, tried = (fake_answer(PROMPT, 40, adapter=adapter.digest) for adapter in known[:2])
    wants = replace(named("style", 40, streaming=True), wants_candidate=True)
    assert await tokens_of(instance, wants) == stable, "there is none"
    assert served.load_candidate("style", known[1].path) == known[1].digest
    assert served.facts()["style"]["digest"] == known[0].digest
    streams = [instance.execute([asked])[0] for asked in (named("style", 40, streaming=True), wants)]
    begun = [ids(await anext(stream)) for stream in streams]
    served.promote_candidate("style")
    assert await tokens_of(instance, named("style", 40)) == tried
    found = [first + [token async for one in stream for token in ids(one)]
             for first, stream in zip(begun, streams, strict=True)]  # fmt: skip
    assert found == [stable, tried]
    assert await tokens_of(instance, wants) == tried, "it has been promoted"
    labels = {"adapter": "style", "digest": known[1].digest}
    assert ("llmserve_adapter_requests_total", labels, 3) in loaded.gauges()
    with pytest.raises(InvalidArgument, match="the engine has no adapter"):
        engine.submit(_generate(known[0].digest))
    engine.close()


async def test_a_candidate_goes_and_leaves_nothing(known: list[SealedAdapter]) -> None:
    engine = fake_engine()
    loaded = load_model(engine, adapters=directories(style=known[0]))
    (instance,), served = loaded.instances, loaded.adapters
    assert served is not None
    wants = replace(named("style"), wants_candidate=True)
    served.load_candidate("style", known[1].path)
    assert await tokens_of(instance, wants) == fake_answer(PROMPT, 5, adapter=known[1].digest)
    served.load("style", known[2].path)
    with pytest.raises(InvalidArgument, match="'style' was reloaded or unloaded in the meantime"):
        served.promote_candidate("style")
    served.unload_candidate("style")
    assert await tokens_of(instance, wants) == fake_answer(PROMPT, 5, adapter=known[2].digest)
    with pytest.raises(InvalidArgument, match="the engine has no adapter"):
        engine.submit(_generate(known[1].digest))
    engine.close()


async def test_what_cannot_be_a_candidate(known: list[SealedAdapter], tmp_path: Path) -> None:
    engine = fake_engine()
    served = load_model(engine, gate=GateRule()).adapters
    assert served is not None
    add_gate_record(known[0].path, engine.info.digest, adapter=known[0].digest, kernels=KERNELS)
    served.load("style", known[0].path)
    foreign = sealed(tmp_path / "foreign", random_parts({"0.qkv": (8, 8)}), base_digest="f" * 64)
    for path, error, words in (
        (known[0].path, InvalidArgument, "'style' is the adapter in .* already"),
        (known[1].path, GateClosed, "no suite has a record for this adapter"),
        (foreign.path, EngineFileError, "was built for the engine"),
        (tmp_path / "gone", NotFound, "no adapter directory"),
    ):
        with pytest.raises(error, match=words):
            served.load_candidate("style", path)
    with pytest.raises(InvalidArgument, match="there is no adapter 'stile'; did you mean 'style'"):
        served.load_candidate("stile", known[0].path)
    served.unload("style")
    with pytest.raises(InvalidArgument, match="the engine has no adapter"):
        engine.submit(_generate(known[0].digest))
    engine.close()


async def tokens_of(instance: Any, asked: InferRequest) -> list[int]:
    return [token async for one in instance.execute([asked])[0] for token in ids(one)]


def _generate(digest: str) -> GenerateRequest:
    return GenerateRequest("r", tuple(PROMPT), SamplingParams(max_tokens=5, temperature=0.0), adapter=digest)


async def test_receipts_and_metrics_name_the_adapter(engine: InflightEngine, known: list[SealedAdapter]) -> None:
    loaded = load_model(engine, adapters=directories(style=known[0]))
    asked = named("style")
    receipt = Tensor("return_receipt", "BOOL", np.array([[True]]))
    wanted = InferRequest("tensorrt_llm", {**asked.inputs, "return_receipt": receipt}, parameters=asked.parameters)
    (answer,) = [one async for one in loaded.instances[0].execute([wanted])[0]]
    assert json.loads(value(answer, "receipt"))["adapter"] == known[0].digest
    labels = {"adapter": "style", "digest": known[0].digest}
    assert ("llmserve_adapter_requests_total", labels, 1) in loaded.gauges()
    assert loaded.adapters is not None
    assert loaded.adapters.facts()["style"]["digest"] == known[0].digest


def test_all_that_cannot_be_loaded_is_told_at_once(known: list[SealedAdapter], tmp_path: Path) -> None:
    (known[0].path / "weights.bin").unlink()
    wrong = {"a/b": known[1], "damaged": known[0], "gone": SealedAdapter(tmp_path / "gone", known[2].manifest)}
    with pytest.raises(
        InvalidArgument, match=r"(?s)3 problems.*'a/b' is not a valid adapter name.*weights.bin cannot be read.*no adap"
    ):
        load_model(fake_engine(), adapters=directories(**wrong))
    with pytest.raises(ModelConfigError, match="expected directories by name, as JSON"):
        load_model(fake_engine(), adapters="[1]")


def test_errors_of_one_keep_their_kind(engine: InflightEngine, known: list[SealedAdapter], tmp_path: Path) -> None:
    served = load_model(engine).adapters
    assert served is not None
    with pytest.raises(NotFound, match="no adapter directory"):
        served.load("style", tmp_path / "gone")
    (known[0].path / "adapter.json").write_text("{")
    with pytest.raises(EngineFileError, match="is damaged"):
        served.load("style", known[0].path)


def test_with_a_gate_an_adapter_needs_a_record_of_itself_with_this_engine(
    known: list[SealedAdapter], tmp_path: Path
) -> None:
    engine, path, digest = fake_engine(), known[0].path, known[0].digest
    base, elsewhere = engine.info.digest, "f" * 64
    with pytest.raises(InvalidArgument, match=r"style: the gate refuses .* no suite has a record for this adapter"):
        load_model(fake_engine(), gate=GateRule(), adapters=directories(style=known[0]))
    served = load_model(engine, gate=GateRule()).adapters
    assert served is not None
    for of_engine, of_adapter in ((base, ""), (elsewhere, digest), (base, elsewhere)):
        add_gate_record(path, of_engine, adapter=of_adapter, kernels=KERNELS)
        with pytest.raises(GateClosed, match=f"llmserve eval ENGINE --adapter {path} --lora ADAPTER"):
            served.load("style", path)
    assert served.facts() == {}, "nothing of what was refused stays"
    add_gate_record(path, base, adapter=digest, kernels=KERNELS)
    served.load("style", path)
    (told,) = served.facts()["style"]["gate"]
    assert (told["suite"], told["passed"]) == ("docs", True)
    add_gate_record(path, base, adapter=digest, kernels=KERNELS, passed=False)
    with pytest.raises(GateClosed, match="suite docs says fail"):
        served.load("other", path)
    engine.close()


def test_engines_that_take_none_are_named(known: list[SealedAdapter]) -> None:
    class Without:
        def __init__(self, engine: Engine) -> None:
            self.info, self.submit, self.stats = engine.info, engine.submit, engine.stats
            self.healthy, self.close = engine.healthy, engine.close

    served = load_model(Without(fake_engine())).adapters
    assert served is not None
    for load in (served.load, served.load_candidate):
        with pytest.raises(Unsupported, match="serve without --cluster"):
            load("style", known[0].path)
