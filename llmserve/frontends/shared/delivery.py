"""The delivery of outputs that a client requests: as classes, in shared memory, or in the protocol's plain form.

It is parsed from a request, separately from the core's request, and applied to each response.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.frontends.shared.classification import classified
from llmserve.frontends.shared.raw_tensors import tensor_bytes
from llmserve.frontends.shared.server_core import Core
from llmserve.frontends.shared.shared_memory import Place, SharedMemory
from llmserve.serving.types import InferResponse, Tensor


@dataclass(frozen=True, slots=True)
class Delivery:
    """Settings by output name. An output is in at most one of the mappings."""

    num_classes: Mapping[str, int] = field(default_factory=dict)
    places: Mapping[str, Place] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        return not self.num_classes and not self.places

    def check(self, memory: SharedMemory) -> None:
        """Check before the model runs that the places for its outputs exist."""
        for place in self.places.values():
            memory.check(place)


PLAIN = Delivery()


def deliver(
    response: InferResponse, delivery: Delivery, *, core: Core, memory: SharedMemory, config: ModelConfig
) -> InferResponse:
    """Convert outputs to classes, and write those with a place to it. Raises if an output cannot be delivered."""
    if delivery.is_plain or not response.outputs:
        return response
    labels = core.labels(response.model_name, response.model_version) if delivery.num_classes else {}

    def delivered(tensor: Tensor) -> Tensor:
        num_classes = delivery.num_classes.get(tensor.name)
        if num_classes:
            return classified(tensor, num_classes, labels.get(tensor.name, ()), batched=config.max_batch_size > 0)
        if tensor.name in delivery.places:
            memory.write(delivery.places[tensor.name], tensor_bytes(tensor), output=tensor.name)
        return tensor

    return replace(response, outputs=tuple(map(delivered, response.outputs)))
