"""A model whose versions behave as a test says, and an ensemble on top of it.

`m` answers X with N responses: Y = X + SHIFT of its version, and then X + SHIFT + 1, and so on. `e` is identity -> `m`
-> identity, once for each response; `outer` is an ensemble of `e`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.backends.identity import IdentityBackend
from llmserve.errors import InternalError, InvalidArgument, LlmserveError
from llmserve.serving.answers import AnswerReader, every_output
from llmserve.serving.backend import Adapters, Backend, LoadContext, LoadedModel
from llmserve.serving.core import InferenceCore, ServerSettings
from llmserve.serving.settings import ControlMode
from llmserve.serving.types import InferRequest, InferResponse, Tensor
from tests.serving.models import identity_config, request, tensors, write_model

NUM_RESPONSES = 3


@dataclass
class Behaviour:
    """Of one version; may be changed while it is served."""

    shift: float = 0.0
    load_error: LlmserveError | None = None
    error: LlmserveError | None = None
    fails_after: int = 0  # responses
    hangs_after: int = -1  # responses
    delay_s: float = 0.0  # before each response
    works: bool = True
    promised_bytes: int = 0
    id_digests: dict[str, str] = field(default_factory=dict)
    reserved_bytes: int = -1  # what it was told when it was loaded
    num_loads: int = 0
    num_closed: int = 0
    num_requests: int = 0
    num_running: int = 0
    loading: asyncio.Event | None = None
    parameters: dict[str, str] = field(default_factory=dict)


@dataclass
class Versions:
    """Backend `versioned`."""

    behaviours: dict[str, Behaviour] = field(default_factory=dict)
    name: str = "versioned"
    comparable: bool = True
    adapters: Adapters | None = None

    def __getitem__(self, version: int) -> Behaviour:
        return self.behaviours.setdefault(str(version), Behaviour())

    def complete_config(self, config: ModelConfig, model_dir: Path) -> ModelConfig:
        return config

    def load(self, context: LoadContext) -> LoadedModel:
        behaviour = self[int(context.version)]
        behaviour.num_loads += 1
        behaviour.reserved_bytes = context.reserved_bytes
        behaviour.parameters = {key: value.string_value for key, value in context.config.parameters.items()}
        if not context.version_dir.is_dir():
            raise InvalidArgument(f"there is no {context.version_dir}")
        if behaviour.load_error is not None:
            raise behaviour.load_error
        return LoadedModel(
            [Instance(f"m_{context.version}", context.version, behaviour)],
            batches_itself=True,
            reads_answer=self._reader,
            promised_bytes=lambda: behaviour.promised_bytes,
            id_digests=lambda: behaviour.id_digests,
            adapters=self.adapters,
        )

    def _reader(self, wanted: InferRequest) -> AnswerReader | None:
        return every_output(wanted) if self.comparable else None


@dataclass
class Instance:
    name: str
    version: str
    behaviour: Behaviour

    def execute(self, requests: Sequence[InferRequest]) -> Sequence[AsyncGenerator[InferResponse, None]]:
        return [self._respond(wanted) for wanted in requests]

    async def _respond(self, wanted: InferRequest) -> AsyncGenerator[InferResponse, None]:
        behaviour = self.behaviour
        behaviour.num_requests += 1
        behaviour.num_running += 1
        answer = partial(InferResponse, "m", self.version, wanted.request_id)
        try:
            value = wanted.inputs["X"].data + behaviour.shift
            if wanted.inputs["X"].data.item(0) < 0:
                raise InvalidArgument("X must not be negative")
            for index in range(NUM_RESPONSES):
                if behaviour.error is not None and index == behaviour.fails_after:
                    raise behaviour.error
                await asyncio.sleep(3600 if index == behaviour.hangs_after else behaviour.delay_s)
                final = index == NUM_RESPONSES - 1
                yield answer((Tensor("Y", "FP32", (value + index).astype(np.float32)),), final=final)
        finally:
            behaviour.num_running -= 1

    def healthy(self) -> bool:
        return self.behaviour.works

    async def close(self) -> None:
        self.behaviour.num_closed += 1


BOOM = InternalError("boom")
DECOUPLED = "model_transaction_policy { decoupled: true }"
STEP = (
    "step {{ model_name: '{name}' model_version: -1 "
    "input_map {{ key: 'X' value: '{x}' }} output_map {{ key: 'Y' value: '{y}' }} }}"
)


def write_repository(path: Path, rules: str | None = None, versions: Sequence[int] = (1,), extra: str = "") -> Path:
    write_m(path, rules, versions, extra)
    write_model(path, "identity", identity_config())
    write_ensemble(path, "e", ("identity", "m", "identity"))
    write_ensemble(path, "outer", ("e",))
    return path


def write_m(path: Path, rules: str | None = None, versions: Sequence[int] = (1,), extra: str = "") -> None:
    parameter = f"parameters {{ key: 'rollout' value {{ string_value: '{rules}' }} }}" if rules is not None else ""
    config = f'backend: "versioned"\n{DECOUPLED}\n{tensors("input", X="FP32 [ 1 ]")}\n'
    config += f"{tensors('output', Y='FP32 [ 1 ]')}\n{parameter}\n{extra}"
    for version in versions:
        write_model(path, "m", config, version=version)


def write_ensemble(path: Path, name: str, models: Sequence[str]) -> None:
    """A chain."""
    places = ["X", *(f"t{index}" for index in range(1, len(models))), "Y"]
    steps = "".join(STEP.format(name=model, x=places[index], y=places[index + 1]) for index, model in enumerate(models))
    config = f'platform: "ensemble"\n{tensors("input", X="FP32 [ 1 ]")}\n{tensors("output", Y="FP32 [ 1 ]")}\n'
    write_model(path, name, f"{config}ensemble_scheduling {{ {steps} }}")


@asynccontextmanager
async def serving_versions(
    repository: Path, versions: Versions, mode: ControlMode = ControlMode.EXPLICIT, **settings: Any
) -> AsyncIterator[InferenceCore]:
    names = ("*",) if mode is ControlMode.EXPLICIT else ()
    backends: dict[str, Backend] = {"versioned": versions, "identity": IdentityBackend()}
    core = InferenceCore(ServerSettings((repository,), control_mode=mode, load_at_start=names, **settings), backends)
    await core.start()
    try:
        yield core
    finally:
        await core.stop(1.0)


def ask(value: float, model: str = "e", **fields: Any) -> InferRequest:
    return request(model, Tensor("X", "FP32", np.array([value], np.float32)), **fields)


async def answers(core: InferenceCore, wanted: InferRequest) -> list[float]:
    """What a client reads; raises its error."""
    found = []
    async for response in core.infer_stream(wanted):
        if response.error is not None:
            raise response.error
        if (tensor := response.output("Y")) is not None:
            found.append(float(tensor.data.item(0)))
    return found


def whole(value: float, shift: float = 0.0) -> list[float]:
    """What one version answers."""
    return [value + shift + index for index in range(NUM_RESPONSES)]


async def ended(core: InferenceCore, model: str = "m", timeout_s: float = 30.0) -> dict[str, Any]:
    """The report of a rollout that has come to its end."""
    await until(lambda: core.rollout(model)["state"] in ("promoted", "rolled_back", "failed"), timeout_s)
    return core.rollout(model)


async def until(holds: Any, timeout_s: float = 30.0) -> None:
    for _ in range(int(timeout_s / 0.01)):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError
