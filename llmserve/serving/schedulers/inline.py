"""Inline execution, without a queue or a thread, of pure and brief requests with one response.

To hand such a request to a thread and back costs several times as much as to execute it. On the loop it delays all
other work, so `LoopTurn` says when other work must run.
"""

from __future__ import annotations

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelDynamicBatching, ModelQueuePolicy

from llmserve.serving.backend import InlineInstance, LoadedModel
from llmserve.serving.schedulers.shared import SharedResources
from llmserve.serving.types import InferRequest

SWITCH = "inline_execution"  # a parameter of a model's config: "false" schedules every request


def inline_instance(config: ModelConfig, loaded: LoadedModel, shared: SharedResources) -> InlineInstance | None:
    """The instance that executes brief requests of this model inline. None: all must be scheduled.

    They must be scheduled if the config or the server decides about them in a queue: batches, rates, cached answers.
    """
    is_off = SWITCH in config.parameters and config.parameters[SWITCH].string_value.strip().lower() == "false"
    is_scheduled = (
        is_off
        or not shared.inline
        or loaded.batches_itself
        or config.model_transaction_policy.decoupled
        or _may_wait(config.dynamic_batching)
        or config.HasField("sequence_batching")
        or shared.rate_limiter is not None
        or (config.response_cache.enable and shared.cache is not None)
    )
    first = loaded.instances[0] if loaded.instances else None
    if is_scheduled or not isinstance(first, InlineInstance) or not first.max_inline_bytes:
        return None
    return first


def _may_wait(batching: ModelDynamicBatching) -> bool:
    """Whether a request may wait although an instance is idle, or may be refused. If not, it runs at once.

    Preferred batch sizes need no check: a request waits for one no longer than the delay.
    """
    return bool(
        batching.max_queue_delay_microseconds
        or batching.preserve_ordering
        or batching.priority_levels
        or batching.priority_queue_policy
        or batching.default_queue_policy != ModelQueuePolicy()
    )


def fits_inline(instance: InlineInstance, request: InferRequest) -> bool:
    """Whether the request is brief enough for the instance."""
    most = instance.max_inline_bytes
    num_bytes = 0
    for tensor in request.inputs.values():
        num_bytes += tensor.data.nbytes
        if tensor.datatype == "BYTES" and num_bytes <= most:
            num_bytes += sum(map(len, tensor.data.flat))
    return 0 < most >= num_bytes
