"""How a client wants its outputs, beyond which: as classes, in shared memory, or both protocols' plain way.

Parsed from a request beside the core's own request, and applied to each of its responses.
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
    """By output name. An output is in at most one of them."""

    num_classes: Mapping[str, int] = field(default_factory=dict)
    places: Mapping[str, Place] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        return not self.num_classes and not self.places

    def check(self, memory: SharedMemory) -> None:
        """Before the model runs: is there room where its outputs shall go?"""
        for place in self.places.values():
            memory.check(place)


PLAIN = Delivery()


def deliver(
    response: InferResponse, delivery: Delivery, *, core: Core, memory: SharedMemory, config: ModelConfig
) -> InferResponse:
    """Outputs as classes; those that have a place are written there. Raises when one cannot be delivered."""
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
