"""Backend `repeat`: sends the elements of IN one by one. For tests of decoupled models; Triton has one, too.

IN     int32 [n]     OUT of the i-th response is its i-th element, and IDX is i
DELAY  uint32 [n]    milliseconds before each response
WAIT   uint32 [1]    milliseconds until the instance accepts another request, whatever is still to be sent
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.errors import InvalidArgument, ModelConfigError, raise_problems
from llmserve.serving.backend import LoadContext, LoadedModel, Released
from llmserve.serving.config.model_config import instance_names
from llmserve.serving.signature import datatype_name
from llmserve.serving.types import InferRequest, InferResponse, Tensor

INPUTS = {"IN": "INT32", "DELAY": "UINT32", "WAIT": "UINT32"}
OUTPUTS = {"OUT": "INT32", "IDX": "UINT32"}


class RepeatInstance:
    def __init__(self, name: str, context: LoadContext) -> None:
        self.name = name
        self._model_name: str = context.config.name
        self._version = context.version
        self._wait_s = 0.0  # of the last request that was accepted

    def execute(self, requests: Sequence[InferRequest]) -> Sequence[AsyncGenerator[InferResponse, None]]:
        self._wait_s = max(int(request.inputs["WAIT"].data[0]) for request in requests) / 1000
        return [self._respond(request) for request in requests]

    def when_released(self, callback: Released) -> None:
        asyncio.get_running_loop().call_later(self._wait_s, callback, None)

    def healthy(self) -> bool:
        return True

    async def close(self) -> None:
        pass

    async def _respond(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        values, delays = request.inputs["IN"].data, request.inputs["DELAY"].data
        if values.shape != delays.shape:
            raise InvalidArgument(f"expected IN and DELAY shape to match, got {values.shape} and {delays.shape}")
        for index, (value, delay_ms) in enumerate(zip(values, delays, strict=True)):
            await asyncio.sleep(int(delay_ms) / 1000)
            outputs = (
                Tensor("OUT", "INT32", np.array([value], np.int32)),
                Tensor("IDX", "UINT32", np.array([index], np.uint32)),
            )
            yield InferResponse(self._model_name, self._version, request.request_id, outputs)
        yield InferResponse(self._model_name, self._version, request.request_id, final=True)


class RepeatBackend:
    name = "repeat"

    def complete_config(self, config: ModelConfig, model_dir: Path) -> ModelConfig:
        return config

    def load(self, context: LoadContext) -> LoadedModel:
        config = context.config
        inputs = {tensor.name: datatype_name(tensor.data_type) for tensor in config.input}
        outputs = {tensor.name: datatype_name(tensor.data_type) for tensor in config.output}
        problems = []
        if config.max_batch_size:
            problems.append("repeat backend only supports models with max_batch_size == 0")
        if inputs != INPUTS:
            problems.append(f"its inputs must be {INPUTS}, got {inputs}")
        if outputs != OUTPUTS:
            problems.append(f"its outputs must be {OUTPUTS}, got {outputs}")
        if not config.model_transaction_policy.decoupled:
            problems.append("it requires model_transaction_policy { decoupled: true }")
        raise_problems(ModelConfigError, f"repeat model '{config.name}' cannot be loaded", problems)
        return LoadedModel([RepeatInstance(name, context) for name in instance_names(config)])
