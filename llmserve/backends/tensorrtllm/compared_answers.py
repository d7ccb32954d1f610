"""Which requests two engines must answer identically, and which parts: the tokens, and the finish reason.

How tokens are divided into responses does not matter. Block counts and times are not part of an answer.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from llmserve.backends.tensorrtllm.batches import num_rows
from llmserve.backends.tensorrtllm.request_tensors import top_k_meant
from llmserve.core import FinishReason, SamplingParams
from llmserve.serving.answers import AnswerReader
from llmserve.serving.types import InferRequest, InferResponse

SEEDS = ("seed", "random_seed")
FROM_OUTSIDE = frozenset(reason.value.encode() for reason in (FinishReason.CANCELLED, FinishReason.TIMED_OUT))


class TokensOfAnswer:
    def __init__(self) -> None:
        self._sequences: dict[int, list[bytes]] = {}
        self._reasons: dict[int, bytes] = {}
        self._is_comparable = True

    def add(self, response: InferResponse) -> None:
        tensors = {tensor.name: tensor.data for tensor in response.outputs}
        if "output_ids" not in tensors:
            self._is_comparable &= not tensors  # the last response may be empty
            return
        index = tensors["sequence_index"].item(0) if "sequence_index" in tensors else 0
        self._sequences.setdefault(index, []).append(tensors["output_ids"].tobytes())
        if "finish_reason" in tensors and (reason := tensors["finish_reason"].item(0)):
            self._reasons[index] = reason
            self._is_comparable &= reason not in FROM_OUTSIDE

    def answer(self) -> Hashable | None:
        if not self._is_comparable or not self._sequences:
            return None
        tokens = {index: b"".join(pieces) for index, pieces in self._sequences.items()}
        return tuple(sorted(tokens.items())), tuple(sorted(self._reasons.items()))


def answer_reader(request: InferRequest) -> AnswerReader | None:
    """None for draws without a seed, for answers whose tokens are unavailable, and for batches."""
    if num_rows(request) > 1:
        return None
    wanted = request.requested_outputs
    if wanted and "output_ids" not in wanted:
        return None
    if wanted and "sequence_index" not in wanted and _number(request, "num_return_sequences", 1) != 1:
        return None
    return TokensOfAnswer() if _is_greedy(request) or any(name in request.inputs for name in SEEDS) else None


def _is_greedy(request: InferRequest) -> bool:
    top_k = top_k_meant(
        _number(request, "runtime_top_k", 0), _number(request, "runtime_top_p", 0.0), _number(request, "min_p", 0.0)
    )
    return SamplingParams(temperature=_number(request, "temperature", 1.0), top_k=top_k).is_greedy


def _number(request: InferRequest, name: str, default: Any) -> Any:
    """The value of a tensor with one element; the model refuses malformed requests."""
    tensor = request.inputs.get(name)
    return default if tensor is None or not tensor.data.size else tensor.data.item(0)
