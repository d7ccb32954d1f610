"""`model_warmup`: requests, created from the config, that every instance runs before its model is ready.

A sample of batch size n is n requests of one element each, executed together; none if n is 0, as in Triton. They do
not appear in statistics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelWarmup

from llmserve.errors import InternalError, LlmserveError, ModelConfigError, raise_problems
from llmserve.serving.backend import ModelInstance
from llmserve.serving.config.files import read_inside
from llmserve.serving.schedulers.controls import Controls, read_states
from llmserve.serving.signature import ModelSignature, datatype_name
from llmserve.serving.tensor_data import random_tensor, tensor_from_bytes, zero_tensor
from llmserve.serving.threads import in_daemon_thread
from llmserve.serving.types import InferRequest, Tensor

WARMUP_FOLDER = "warmup"


@dataclass(frozen=True, slots=True)
class WarmupSample:
    name: str
    num_runs: int
    requests: tuple[InferRequest, ...]  # of one execution


async def warm_up(config: ModelConfig, model_dir: Path, version: str, instances: Sequence[ModelInstance]) -> None:
    """Run the samples on all instances. Raises `LlmserveError`."""
    if not config.model_warmup:
        return
    work = partial(warmup_samples, config, model_dir, version)
    samples = await in_daemon_thread(work, f"warm-up-{config.name}")
    await asyncio.gather(*(_run_samples(config.name, instance, samples) for instance in instances))


def warmup_samples(config: ModelConfig, model_dir: Path, version: str) -> list[WarmupSample]:
    """Create the samples. Blocking: reads data files. Raises `ModelConfigError` that lists all invalid samples."""
    signature = ModelSignature(config)
    added = _added_inputs(config, model_dir)
    problems: list[str] = []
    samples = []
    for declared in filter(lambda sample: sample.batch_size, config.model_warmup):
        try:
            request = _request(config, declared, model_dir, version)
            inputs = {name: tensor for name, tensor in request.inputs.items() if name not in added}
            signature.check(request.with_inputs(inputs))
        except (OSError, ValueError, LlmserveError) as error:
            problems.append(f"model_warmup '{declared.name}': {error}")
        else:
            seen = signature.to_model(request.with_inputs(inputs))
            seen = seen.with_inputs({**seen.inputs, **added, **{n: t for n, t in request.inputs.items() if n in added}})
            samples.append(WarmupSample(declared.name, max(1, declared.count), (seen,) * declared.batch_size))
    raise_problems(ModelConfigError, f"model '{config.name}' cannot be warmed up", problems)
    return samples


def _added_inputs(config: ModelConfig, model_dir: Path) -> dict[str, Tensor]:
    """Inputs that the scheduler adds to requests. A sample may contain its own."""
    if not config.HasField("sequence_batching"):
        return {}
    states = {spec.input_name: spec.initial for spec in read_states(config, model_dir)}
    return {**Controls(config).of_nothing(), **states}


def _request(config: ModelConfig, declared: ModelWarmup, model_dir: Path, version: str) -> InferRequest:
    batch = (1,) if config.max_batch_size > 0 else ()
    inputs = {name: _tensor(name, given, (*batch, *given.dims), model_dir) for name, given in declared.inputs.items()}
    return InferRequest(config.name, inputs, version, request_id=f"warmup:{declared.name}")


def _tensor(name: str, given: ModelWarmup.Input, shape: tuple[int, ...], model_dir: Path) -> Tensor:
    datatype = datatype_name(given.data_type)
    if given.input_data_file:
        try:
            data = read_inside(model_dir, f"{WARMUP_FOLDER}/{given.input_data_file}")
            return tensor_from_bytes(name, datatype, shape, data)
        except ValueError as error:
            raise ValueError(f"file '{given.input_data_file}' for input '{name}': {error}") from None
    if given.random_data:
        return random_tensor(name, datatype, shape, np.random.default_rng(0))
    return zero_tensor(name, datatype, shape)


async def _run_samples(model_name: str, instance: ModelInstance, samples: Sequence[WarmupSample]) -> None:
    for sample in samples:
        for _ in range(sample.num_runs):
            try:
                await _run(instance, sample)
            except Exception as error:  # border: a model that raises anything is not served
                raise InternalError(
                    f"model '{model_name}', instance '{instance.name}': failed to run warmup sample '{sample.name}': "
                    f"{error}"
                ) from error


async def _run(instance: ModelInstance, sample: WarmupSample) -> None:
    for stream in instance.execute(sample.requests):
        async with aclosing(stream):
            async for response in stream:
                if response.error is not None:
                    raise response.error
