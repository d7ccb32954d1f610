"""A `tensorrt_llm` model over an engine of the test's choice, and requests as clients write them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.backends.tensorrtllm import TensorrtLlmBackend
from llmserve.backends.tensorrtllm.backend import EngineInstance
from llmserve.engine.base import Engine
from llmserve.engine.directory.gate_record import GateRule
from llmserve.serving.backend import LoadContext, LoadedModel
from llmserve.serving.types import InferRequest, InferResponse, Tensor

PIPELINES = Path(__file__).resolve().parents[3] / "pipelines"
UNSIGNED = ("seed", "random_seed", "lora_task_id", "prompt_table_extra_id")
DATATYPES = {"i": "INT32", "f": "FP32", "b": "BOOL", "u": "UINT64", "O": "BYTES"}


def read_config(model: str) -> ModelConfig:
    return text_format.Parse((PIPELINES / model / "config.pbtxt").read_text(), ModelConfig())


def with_parameters(config: ModelConfig, **parameters: str) -> ModelConfig:
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    return config


def no_infer(request: InferRequest) -> AsyncGenerator[InferResponse, None]:
    raise AssertionError("this backend calls no other model")


def load_model(
    engine: Engine, config: ModelConfig | None = None, gate: GateRule | None = None, **parameters: Any
) -> LoadedModel:
    config = with_parameters(config or read_config("tensorrt_llm"), **parameters)
    model_dir = PIPELINES / config.name
    context = LoadContext(config, model_dir, "1", model_dir / "1", no_infer)
    return TensorrtLlmBackend(lambda path, settings: engine, gate=gate).load(context)


def instance_over(engine: Engine, config: ModelConfig | None = None, **parameters: Any) -> EngineInstance:
    (instance,) = load_model(engine, config, **parameters).instances
    assert isinstance(instance, EngineInstance)
    return instance


def tensor(name: str, value: Any) -> Tensor:
    """Lists and scalars with a batch dimension put before them."""
    data = np.array([value]) if isinstance(value, list) else np.array([[value]])
    if data.dtype.kind in "SU" or (data.dtype.kind == "O"):
        data = data.astype(object)
    elif data.dtype.kind == "i":
        data = data.astype(np.uint64 if name in UNSIGNED else np.int32)
    elif data.dtype.kind == "f":
        data = data.astype(np.float32)
    return Tensor(name, DATATYPES[data.dtype.kind], data)


def tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: tensor(name, value) for name, value in values.items()}


def request(prompt: list[int], request_id: str = "", **values: Any) -> InferRequest:
    given = {"input_ids": prompt, "input_lengths": len(prompt), "request_output_len": 5, **values}
    return InferRequest("tensorrt_llm", tensors(given), model_version="1", request_id=request_id)


async def responses(instance: EngineInstance, sent: InferRequest) -> list[InferResponse]:
    (stream,) = instance.execute([sent])
    return [response async for response in stream]


def ids(response: InferResponse) -> list[int]:
    found = response.output("output_ids")
    assert found is not None
    assert found.data.shape[:2] == (1, 1)
    return list(found.data[0, 0].tolist())


def value(response: InferResponse, name: str) -> Any:
    found = response.output(name)
    assert found is not None, name
    assert found.data.shape == (1, 1)
    item = found.data[0, 0]
    return item.decode() if isinstance(item, bytes) else item.item()
