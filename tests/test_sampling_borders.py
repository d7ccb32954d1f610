"""A law about `SamplingParams`: whatever a request passes on its way says something about each of its fields.

A border takes a field under a name of its own and hands it on unchanged, or lists it as refused, and why. What a border
takes is read from the border itself, and a value is sent through it. A new field fails here until all of them know it.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import pytest
from pydantic import ValidationError
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.backends.tensorrtllm.request_tensors import read_request
from llmserve.builder.triton_contract import ensemble_of_contract
from llmserve.cli.chat import entry as chat
from llmserve.cli.chat import parameters as chat_parameters
from llmserve.cli.run import RunOptions
from llmserve.cluster import requests as cluster
from llmserve.core import FinishReason, GenerateRequest, SamplingParams
from llmserve.engine.base import EngineInfo
from llmserve.engine.native.records import SAMPLE, word_of
from llmserve.engine.native.step import FlatStep, StepMemory
from llmserve.engine.remote.frames import FrameReader, preamble
from llmserve.engine.remote.messages import read_submit, submit_frame
from llmserve.engine.tensorrt_llm.sampling import sampling_arguments
from llmserve.frontends.text.anthropic.fields import MessagesRequest
from llmserve.frontends.text.ollama.fields import OllamaOptions
from llmserve.frontends.text.openai.chat_fields import ChatRequest
from llmserve.frontends.text.openai.completions import CompletionRequest
from llmserve.frontends.text.openai.response_fields import ResponseRequest
from llmserve.scheduler.plan import Chunk, SampleRequest, StepPlan
from llmserve.serving.config.pbtxt import parse_config_text
from llmserve.serving.signature import datatype_name
from llmserve.serving.types import NUMPY_DTYPES, Tensor
from llmserve.stages.receipt import SAMPLING_FIELDS, AskedTokens, Receipt

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "llmserve"
ASSETS = PACKAGE / "frontends/page/assets"
FIELDS = tuple(each.name for each in fields(SamplingParams))
Values = Mapping[str, Any]

# Nothing at its default, all of it exact in float32. A new field gets a value here, and then a word at each border.
SENT = SamplingParams(
    max_tokens=9,
    min_tokens=3,
    temperature=0.5,
    top_k=7,
    top_p=0.75,
    min_p=0.125,
    repetition_penalty=1.25,
    presence_penalty=0.5,
    frequency_penalty=0.25,
    seed=11,
)
ASKED = GenerateRequest("r", (1, 2), SENT)


def config_of(model: str) -> ModelConfig:
    config, problems = parse_config_text((ROOT / "pipelines" / model / "config.pbtxt").read_text())
    assert problems == []
    return config


ENSEMBLE, ENGINE_MODEL = config_of("ensemble"), config_of("tensorrt_llm")
STEPS = {step.model_name: step for step in ENSEMBLE.ensemble_scheduling.step}


def names_of_inputs(config: ModelConfig) -> set[str]:
    return {tensor.name for tensor in config.input}


def request_of_engine_model(values: Values) -> GenerateRequest:
    """What `tensorrt_llm` makes of inputs by their names there."""
    dtypes = {tensor.name: datatype_name(tensor.data_type) for tensor in ENGINE_MODEL.input}
    given = {"input_ids": [1, 2], "request_output_len": 9} | dict(values)
    tensors = {
        name: Tensor(name, dtypes[name], np.array(value, NUMPY_DTYPES[dtypes[name]]).reshape(1, -1))
        for name, value in given.items()
    }
    return read_request(tensors, request_id="r", max_seq_len=100, vocab_sizes=set(), excludes_input=True).generate


def request_of_ensemble(values: Values) -> GenerateRequest:
    """Along the maps of the ensemble; preprocessing hands on what it reads and writes under one name."""
    first, engine = STEPS["preprocessing"], STEPS["tensorrt_llm"]
    tensors = dict(values)
    for name, tensor in first.input_map.items():
        if tensor in values and name in first.output_map:
            tensors[first.output_map[name]] = values[tensor]
    given = {name: tensors[tensor] for name, tensor in engine.input_map.items() if tensor in tensors}
    return request_of_engine_model(given)


def by_engine_model(values: Values) -> Values:
    return fields_of(request_of_engine_model(values).sampling)


def by_ensemble(values: Values) -> Values:
    return fields_of(request_of_ensemble(values).sampling)


def by_api(body: Values, request: type[Any], *given: Any) -> Values:
    """What an API's fields become as inputs of the ensemble, and that of an engine."""
    return by_ensemble(request.model_validate(body).sampling(*given).values())


def by_chat(values: Values) -> Values:
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}], **values}
    return by_api(body, ChatRequest, values.get("max_tokens"), 1, {})


def by_completions(values: Values) -> Values:
    return by_api({"model": "m", "prompt": "?", **values}, CompletionRequest, values["max_tokens"], 1, {})


def by_responses(values: Values) -> Values:
    return by_api({"model": "m", "input": "?", **values}, ResponseRequest, {})


def by_messages(values: Values) -> Values:
    return by_api({"model": "m", "messages": [{"role": "user", "content": "?"}], **values}, MessagesRequest, {})


def by_ollama(values: Values) -> Values:
    return by_api(values, OllamaOptions, {})


def by_run(values: Values) -> Values:
    return fields_of(RunOptions(**values).sampling())


def by_cluster(values: Values) -> Values:
    groups = {
        group: {name: value for name, value in values.items() if name in known}
        for group, known in cluster.KNOWN.items()
    }
    found = cluster.request_of({"token_ids": [1], **groups}, "r", max_seq_len=100, migrates=False)
    return fields_of(found.sampling)


def over_socket(request: GenerateRequest) -> GenerateRequest:
    (frame,) = FrameReader(1 << 20).feed(preamble() + submit_frame(request, 1).encoded())
    return read_submit(frame)[1]


def by_socket(values: Values) -> Values:
    return fields_of(over_socket(GenerateRequest("r", (1,), SamplingParams(**values))).sampling)


def by_receipt(values: Values) -> Values:
    asked = AskedTokens(GenerateRequest("r", (1,), SamplingParams(**values)))
    engine = EngineInfo("e", "cpu", "Llama", "float16", "d", 100, 64, 4, 64, kernels="avx512")
    receipt = Receipt.of(engine, asked, 0, (1,), "", FinishReason.LENGTH)
    return fields_of(Receipt.read(json.loads(receipt.text())).asked.generate.sampling)


def by_library_of_tensorrt_llm(values: Values) -> Values:
    return sampling_arguments(SamplingParams(**values))


def words_of_record() -> dict[str, tuple[int, str]]:
    """Of `SampleRecord` in step.h: where each of its fields begins, in words of 32 bits, and its type."""
    text = (PACKAGE / "engine/cpu/kernels/step.h").read_text()
    found = re.search(r"struct SampleRecord \{(.*?)\n\};", text, re.DOTALL)
    assert found is not None
    words, place = {}, 0
    for kind, names in re.findall(r"^  (uint64_t|uint32_t|float) ([^;]*);", found[1], re.MULTILINE):
        for name in names.split(","):
            words[name.partition("=")[0].strip()] = place, kind
            place += 2 if kind == "uint64_t" else 1
    return words


def words_of_kernels() -> dict[str, tuple[int, str]]:
    """What the kernels for CUDA read of the same record, by their names; the types are the record's."""
    text = (PACKAGE / "engine/cuda/kernels/choosing.py").read_text()
    kinds = dict(words_of_record().values())
    found = re.findall(r'^(\w+): tl\.constexpr = .*?word_of\(SAMPLE, "(\w+)"\)', text, re.MULTILINE)
    places = {name: word_of(SAMPLE, field) for name, field in found}
    return {name: (place, kinds[place]) for name, place in places.items()}


def at_places(words: Mapping[str, tuple[int, str]], sampling: SamplingParams = SENT) -> Values:
    """What stands there in the record that the runners make."""
    types = {"uint64_t": np.uint64, "uint32_t": np.uint32, "float": np.float32}
    chunk = Chunk(0, (1,), 0, (0,), SampleRequest(sampling, stream=0, position=1))
    data = FlatStep(StepPlan((chunk,)), 100, StepMemory()).samples[0].tobytes()
    return {name: np.frombuffer(data, types[kind], 1, 4 * place).item() for name, (place, kind) in words.items()}


def flags_of_chat() -> set[str]:
    """Its own, and what `--param` takes."""
    return {*inspect.signature(chat.command).parameters, *chat_parameters.names(ENSEMBLE)}


def fields_of_page() -> set[str]:
    listed = re.search(r"const NUMBERS = \[(.*?)\];", (ASSETS / "settings.js").read_text(), re.DOTALL)
    assert listed is not None
    form = set(re.findall(r'<input name="(\w+)"', (ASSETS / "index.html").read_text()))
    return form & set(re.findall(r'"(\w+)"', listed[1]))


@dataclass(frozen=True)
class Border:
    takes: Collection[str]  # under the border's names
    behind: Callable[[Values], Values]  # fields by those names -> what is there behind it, by ours or by those
    names: Mapping[str, str] = field(default_factory=dict)  # where they differ from ours
    refuses: Mapping[str, str] = field(default_factory=dict)  # field -> why

    def name(self, parameter: str) -> str:
        return self.names.get(parameter, parameter)


NOT_ANTHROPIC = dict.fromkeys(
    ("min_tokens", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"),
    "no field of Anthropic's API; an unknown field is refused",
)
NOT_RESPONSES = dict.fromkeys(
    ("min_tokens", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    "no field of OpenAI's responses; an unknown field is refused",
)
OF_SCHEDULER = {
    "max_tokens": "the scheduler ends the answer",
    "min_tokens": "the scheduler bans the end tokens until then",
}
OF_ENGINE = {"max_tokens": "request_output_len", "top_k": "runtime_top_k", "top_p": "runtime_top_p"}
OF_KERNELS = {name: name.partition("_penalty")[0].upper() for name in FIELDS}

BORDERS = {
    "pipelines/tensorrt_llm": Border(names_of_inputs(ENGINE_MODEL), by_engine_model, OF_ENGINE),
    "pipelines/ensemble": Border(names_of_inputs(ENSEMBLE), by_ensemble),
    "exported ensemble": Border(
        names_of_inputs(ensemble_of_contract(ENSEMBLE)),
        by_ensemble,
        refuses={"min_p": "TensorRT-LLM's own Triton backend has no such input"},
    ),
    "/v1/chat/completions": Border(ChatRequest.model_fields, by_chat),
    "/v1/completions": Border(CompletionRequest.model_fields, by_completions),
    "/v1/responses": Border(
        ResponseRequest.model_fields, by_responses, {"max_tokens": "max_output_tokens"}, NOT_RESPONSES
    ),
    "/v1/messages": Border(MessagesRequest.model_fields, by_messages, refuses=NOT_ANTHROPIC),
    "/api/chat and /api/generate": Border(
        OllamaOptions.model_fields,
        by_ollama,
        {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"},
        {"min_tokens": "no option of Ollama's; an unknown option is refused"},
    ),
    "the page": Border(
        fields_of_page(), by_chat, refuses={"min_tokens": "the form has no such field: an answer ends where it ends"}
    ),
    "llmserve chat": Border(flags_of_chat(), by_ensemble),
    "llmserve run": Border(
        RunOptions.__dataclass_fields__,
        by_run,
        {"max_tokens": "max_output_len", "seed": "random_seed"},
        {"min_tokens": "no such flag; served models have the input"},
    ),
    "cluster requests": Border(set().union(*cluster.KNOWN.values()), by_cluster),
    "engine/remote": Border(submit_frame(ASKED, 1).document["sampling"], by_socket),
    "receipts": Border(SAMPLING_FIELDS, by_receipt),
    "step.h": Border(words_of_record(), lambda _: at_places(words_of_record()), refuses=OF_SCHEDULER),
    "kernels for CUDA": Border(words_of_kernels(), lambda _: at_places(words_of_kernels()), OF_KERNELS, OF_SCHEDULER),
    "tensorrt_llm": Border(
        sampling_arguments(SENT),
        by_library_of_tensorrt_llm,
        refuses={"max_tokens": "goes beside the sampling parameters, cut to what there is room for"},
    ),
}


def fields_of(sampling: SamplingParams) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in FIELDS}


def test_every_field_is_sent_with_a_value_that_means_something() -> None:
    off = SamplingParams()
    assert [name for name in FIELDS if getattr(SENT, name) == getattr(off, name)] == []
    assert SENT.problems() == []
    assert not SENT.is_greedy


@pytest.mark.parametrize("place", BORDERS)
def test_a_border_passes_each_field_on_or_says_why_not(place: str) -> None:
    border = BORDERS[place]
    silent = [name for name in FIELDS if (border.name(name) in border.takes) == (name in border.refuses)]
    assert silent == [], f"{place} neither takes nor refuses these, or both"
    assert set(border.refuses) <= set(FIELDS)
    assert all(border.refuses.values())
    passed = {name: getattr(SENT, name) for name in FIELDS if name not in border.refuses}
    behind = border.behind({border.name(name): value for name, value in passed.items()})
    found = {name: behind.get(name, behind.get(border.name(name))) for name in passed}
    assert found == passed


@pytest.mark.parametrize("place", [place for place, border in BORDERS.items() if place.startswith("/")])
def test_an_api_refuses_what_it_does_not_take_by_name(place: str) -> None:
    border = BORDERS[place]
    passed = {border.name(name): getattr(SENT, name) for name in FIELDS if name not in border.refuses}
    for name in border.refuses:
        with pytest.raises(ValidationError, match=name):
            border.behind({**passed, name: getattr(SENT, name)})


CONVERSATION = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
OFF = {"speculation": False}  # changes no answer, so it is no sampling parameter
SWITCHES: Mapping[str, Callable[[], GenerateRequest]] = {
    "pipelines/tensorrt_llm": lambda: request_of_engine_model(OFF),
    "pipelines/ensemble": lambda: request_of_ensemble({"max_tokens": 9, **OFF}),
    "chat": lambda: request_of_ensemble(ChatRequest.model_validate(CONVERSATION | OFF).sampling(9, 1, {}).values()),
    "completions": lambda: request_of_ensemble(
        CompletionRequest.model_validate({"model": "m", "prompt": "?"} | OFF).sampling(9, 1, {}).values()
    ),
    "responses": lambda: request_of_ensemble(
        ResponseRequest.model_validate({"model": "m", "input": "?"} | OFF).sampling({}).values()
    ),
    "messages": lambda: request_of_ensemble(
        MessagesRequest.model_validate(CONVERSATION | {"max_tokens": 9} | OFF).sampling({}).values()
    ),
    "Ollama": lambda: request_of_ensemble(OllamaOptions.model_validate(OFF).sampling({}).values()),
    "engine/remote": lambda: over_socket(GenerateRequest("r", (1,), speculation=False)),
}


@pytest.mark.parametrize("place", SWITCHES)
def test_a_border_passes_on_that_nothing_may_be_drafted(place: str) -> None:
    assert not SWITCHES[place]().speculation
    assert request_of_engine_model({}).speculation


@pytest.mark.parametrize("greedy", [SamplingParams(temperature=0.5, top_k=1), SamplingParams(temperature=0.0)])
def test_kernels_know_a_greedy_request_by_its_temperature(greedy: SamplingParams) -> None:
    assert at_places(words_of_record(), greedy)["temperature"] == 0


# Where else a temperature or a top_k is compared with what makes an answer greedy.
DECIDES = {
    "core.py": "the owner: `SamplingParams.is_greedy`",
    "engine/cuda/choices.py": "of the kernels' record, whose temperature is 0 for a greedy request",
    "engine/cuda/kernels/drawing.py": "likewise",
    "frontends/text/answers/generation.py": "leaves out the inputs that only a draw needs",
    "backends/tensorrtllm/request_tensors.py": "what TensorRT-LLM means by a request that gives none of them",
    "cli/run.py": "the temperature where the command line gives none",
}


def test_one_place_says_whether_tokens_are_drawn() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        and {"temperature", "top_k"} & _names(node.left)
        and any(isinstance(each, ast.Constant) and each.value in (0, 1) for each in node.comparators)
    }
    assert found == set(DECIDES)


def _is_text(node: ast.expr) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _names(expression: ast.expr) -> set[str]:
    nodes = list(ast.walk(expression))
    plain = {node.id.lower() for node in nodes if isinstance(node, ast.Name)}
    texts = [node.slice.value for node in nodes if isinstance(node, ast.Subscript) and _is_text(node.slice)]
    plain |= set(map(str, texts))
    return plain | {node.attr.lower() for node in nodes if isinstance(node, ast.Attribute)}
