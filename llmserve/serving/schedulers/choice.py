"""Chooses the scheduler that a model's config asks for."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.errors import ModelConfigError
from llmserve.serving.backend import LoadedModel
from llmserve.serving.instruments.model_statistics import ModelStatistics
from llmserve.serving.schedulers.base import ModelScheduler
from llmserve.serving.schedulers.caching import CachingScheduler
from llmserve.serving.schedulers.controls import StateSpec
from llmserve.serving.schedulers.passthrough import PassThroughScheduler
from llmserve.serving.schedulers.queued_scheduler import QueuedScheduler
from llmserve.serving.schedulers.sequence_scheduler import SequenceScheduler
from llmserve.serving.schedulers.shared import SharedResources
from llmserve.serving.signature import ModelSignature

logger = logging.getLogger(__name__)


def make_scheduler(
    config: ModelConfig,
    loaded: LoadedModel,
    *,
    signature: ModelSignature,
    statistics: ModelStatistics,
    states: Sequence[StateSpec],
    shared: SharedResources,
) -> ModelScheduler:
    """A scheduler for the instances of a model. Logs settings without effect. Raises `ModelConfigError`."""
    if loaded.batches_itself and config.HasField("sequence_batching"):
        raise ModelConfigError(
            f"model '{config.name}' cannot be loaded: backend '{config.backend}' does not support sequence_batching: "
            "it does its own batching; remove it"
        )
    for problem in _without_effect(config, loaded, shared):
        logger.warning("model '%s': %s", config.name, problem)
    if loaded.batches_itself:
        scheduler: ModelScheduler = PassThroughScheduler(loaded.instances, statistics, signature.batch_size)
    elif config.HasField("sequence_batching"):
        scheduler = SequenceScheduler(
            config, signature, loaded.instances, statistics=statistics, states=states, shared=shared
        )
    else:
        scheduler = QueuedScheduler(config, signature, loaded.instances, statistics, shared)
    return cached(config, scheduler, shared)


def cached(config: ModelConfig, scheduler: ModelScheduler, shared: SharedResources) -> ModelScheduler:
    """The scheduler with the response cache in front, if the config asks for it and the server has one."""
    if not config.response_cache.enable:
        return scheduler
    if shared.cache is None:
        advice = "start the server with --cache-config local,size=BYTES"
        logger.warning("model '%s': response_cache has no effect: %s", config.name, advice)
        return scheduler
    return CachingScheduler(scheduler, shared.cache)


def _without_effect(config: ModelConfig, loaded: LoadedModel, shared: SharedResources) -> list[str]:
    problems = []
    is_limited = any(group.HasField("rate_limiter") for group in config.instance_group)
    if loaded.batches_itself:
        if config.HasField("dynamic_batching"):
            problems.append("dynamic_batching has no effect: the backend does its own batching")
        if is_limited:
            problems.append("rate_limiter has no effect: the backend's instances accept any number of requests")
    elif is_limited and shared.rate_limiter is None:
        problems.append("rate_limiter has no effect: start the server with --rate-limit execution_count")
    if (config.batch_input or config.batch_output) and not loaded.collates:
        problems.append(
            f"batch_input and batch_output have no effect: backend '{config.backend}' gets a batch as single requests"
        )
    return problems
