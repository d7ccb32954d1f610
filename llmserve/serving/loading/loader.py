"""From a model directory to served versions: config, backend, instances, scheduler."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.errors import ModelConfigError, raise_problems
from llmserve.serving.backend import Backend, LoadContext, LoadedModel, ModelControl
from llmserve.serving.config.auto_complete import complete_backend
from llmserve.serving.config.features import ignored_features
from llmserve.serving.config.files import path_problems
from llmserve.serving.config.labels import Labels, labels_of_steps, read_labels
from llmserve.serving.config.model_config import (
    absent_versions,
    apply_overrides,
    config_problems,
    drop_repeated_outputs,
    fill_defaults,
    is_ensemble,
    served_versions,
)
from llmserve.serving.config.scheduling import scheduling_problems
from llmserve.serving.ensemble import EnsembleScheduler, StepModel
from llmserve.serving.ensemble_plan import plan_ensemble
from llmserve.serving.instruments.model_statistics import ModelStatistics
from llmserve.serving.loading.repository import CONFIG_NAME, ModelSource
from llmserve.serving.loading.warmup import warm_up
from llmserve.serving.model import ServedModel
from llmserve.serving.schedulers.choice import cached, make_scheduler
from llmserve.serving.schedulers.controls import read_states
from llmserve.serving.schedulers.inline import inline_instance
from llmserve.serving.schedulers.shared import SharedResources
from llmserve.serving.settings import ServerSettings
from llmserve.serving.signature import ModelSignature
from llmserve.serving.threads import in_daemon_thread
from llmserve.serving.types import InferRequest, InferResponse

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerContext:
    """The parts of the server that a model uses."""

    infer: Callable[[InferRequest], AsyncGenerator[InferResponse, None]]  # sends requests to other models
    control: ModelControl
    shared: SharedResources


@dataclass(frozen=True, slots=True, eq=False)
class PreparedModel:
    """A model whose config is complete and valid; nothing is loaded yet."""

    source: ModelSource
    config: ModelConfig
    versions: tuple[str, ...]
    labels: Labels
    statistics: dict[str, ModelStatistics] = field(default_factory=dict)  # of an ensemble, by version


def prepare(source: ModelSource, backends: Mapping[str, Backend], settings: ServerSettings) -> PreparedModel:
    """Complete and check the config. Blocking: backends may read the model. Raises `ModelConfigError`."""
    headline = f"model {source.name!r} cannot be loaded"
    raise_problems(ModelConfigError, headline, source.problems)
    config = ModelConfig()
    config.CopyFrom(source.config)
    if not source.has_config and not settings.auto_complete:
        raise ModelConfigError(f"{headline}: {CONFIG_NAME} is missing in {source.path}, and auto-complete is disabled")
    if not is_ensemble(config):
        complete_backend(config, source.path / str(source.versions[-1]), backends)
        raise_problems(ModelConfigError, headline, _backend_problems(source, config, backends))
    raise_problems(ModelConfigError, headline, path_problems(config))
    apply_overrides(config, settings.parameters_for(config))
    apply_overrides(config, settings.parameter_overrides.get(source.name, {}))
    apply_overrides(config, source.parameters)
    if not is_ensemble(config) and settings.auto_complete:
        config = backends[config.backend].complete_config(config, source.path)
    repeated = drop_repeated_outputs(config)
    fill_defaults(config)
    versions = served_versions(config, source.versions)
    problems = config_problems(config)
    if not versions:
        problems.append(f"at least one version must be available under the version policy of model '{source.name}'")
    raise_problems(ModelConfigError, headline, problems)
    for warning in (*repeated, *ignored_features(config), *absent_versions(config, source.versions)):
        logger.warning("model '%s': %s", source.name, warning)
    return PreparedModel(source, config, tuple(map(str, versions)), read_labels(config, source.path))


def _backend_problems(source: ModelSource, config: ModelConfig, backends: Mapping[str, Backend]) -> list[str]:
    if config.backend in backends:
        return []
    known = ", ".join(sorted(backends))
    if config.backend:
        return [f"unknown backend '{config.backend}'; known backends: {known}"]
    if config.platform:
        return [f"unknown platform '{config.platform}'; write backend: one of {known}"]
    missing = "names no backend" if source.has_config else f"is missing in {source.path}"
    return [f"{CONFIG_NAME} {missing}, and no file says which one it is for; known backends: {known}"]


async def load_version(
    prepared: PreparedModel,
    version: str,
    backend: Backend,
    server: ServerContext,
    *,
    files_version: str = "",
    reserved_bytes: int = 0,
) -> ServedModel:
    """Load one version and warm it up. `files_version`: the version that has its files, if that is another."""
    began = time.monotonic()
    config, directory = prepared.config, prepared.source.path
    context = LoadContext(
        config,
        directory,
        version,
        directory / (files_version or version),
        infer=server.infer,
        control=server.control,
        loop=asyncio.get_running_loop(),
        reserved_bytes=reserved_bytes,
    )
    limiter = server.shared.rate_limiter
    if limiter is not None:
        raise_problems(ModelConfigError, f"model '{config.name}' cannot be loaded", limiter.problems(config))
    states = await asyncio.to_thread(read_states, config, directory)
    loaded = await in_daemon_thread(partial(backend.load, context), f"load-{config.name}")
    try:
        await warm_up(config, directory, version, loaded.instances)
        signature = ModelSignature(config)
        statistics = ModelStatistics(config.name, version)
        statistics.keep_distributions(server.shared.metrics, config)
        scheduler = make_scheduler(
            config, loaded, signature=signature, statistics=statistics, states=states, shared=server.shared
        )
    except BaseException:
        await asyncio.gather(*(instance.close() for instance in loaded.instances), return_exceptions=True)
        raise
    served = ServedModel(
        config,
        version,
        signature=signature,
        statistics=statistics,
        scheduler=scheduler,
        loaded=loaded,
        inline=inline_instance(config, loaded, server.shared),
        turn=server.shared.turn,
        load_s=time.monotonic() - began,
    )
    served.labels = prepared.labels
    return served


def as_it_is(model: ServedModel) -> StepModel:
    return model


def serve_ensemble(
    prepared: PreparedModel,
    version: str,
    find: Callable[[str, str], ServedModel],
    shared: SharedResources,
    *,
    step: Callable[[ServedModel], StepModel] = as_it_is,
) -> ServedModel:
    """An ensemble of the models that `find` returns now. Raises `ModelConfigError`.

    Its requests run to their end on these models, whatever is loaded meanwhile. Its statistics continue when it is
    planned again because a step was reloaded. `step`: wraps a model, as the ensemble's requests use it.
    """
    config = ModelConfig()
    config.CopyFrom(prepared.config)
    plan = plan_ensemble(config, find)
    if plan.decoupled:
        config.model_transaction_policy.decoupled = True
        raise_problems(ModelConfigError, f"ensemble '{config.name}' cannot be loaded", scheduling_problems(config))
    parts = {key: find(*key) for key in {(step.model_name, step.model_version) for step in plan.steps}}
    if version not in prepared.statistics:
        prepared.statistics[version] = ModelStatistics(config.name, version)
        prepared.statistics[version].keep_distributions(shared.metrics, config)
    statistics = prepared.statistics[version]
    models = {key: step(part) for key, part in parts.items()}
    ensemble = EnsembleScheduler(config, version, plan, models=models, statistics=statistics, turn=shared.turn)
    scheduler = cached(config, ensemble, shared)
    served = ServedModel(
        config,
        version,
        signature=ModelSignature(config),
        statistics=statistics,
        scheduler=scheduler,
        loaded=LoadedModel(()),
        parts=list(parts.values()),
    )
    served.labels = {**labels_of_steps(config, {part.name: part.labels for part in parts.values()}), **prepared.labels}
    return served
