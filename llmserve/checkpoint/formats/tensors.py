"""The tensors of a quantized checkpoint under the names of the original, each weight in float32."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

from llmserve.checkpoint.formats.base import Format, Module, StoredWeight
from llmserve.checkpoint.stored_tensor import Rows, Tensor, TensorInfo

WEIGHT = "weight"
BIAS = "bias"


class ExpandedTensors:
    """Opening checks everything except the weights' numbers, and adds problems to `problems`."""

    def __init__(
        self, stored: Mapping[str, TensorInfo], read: Callable[[str], Tensor], format: Format, problems: list[str]
    ) -> None:
        self._format = format
        self._weights: dict[str, StoredWeight] = {}
        self._tensors = {name: info for name, info in stored.items() if _part(name) not in format.unused}
        self._surplus: set[str] = set()
        for module in _modules(self._tensors, read, format.separator):
            weight = format.weight(module, problems)
            if weight is not None:
                self._take(module, weight, problems)
        if format.main and not self._weights and not problems:
            problems.append(f"the config names {format.name}, but no module has {format.main}")

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    @property
    def surplus(self) -> frozenset[str]:
        """Tensors that a network may lack: AutoGPTQ adds biases of zeros to modules without a bias."""
        return frozenset(self._surplus)

    @property
    def shares(self) -> Mapping[str, float]:
        """The share of numbers in each form."""
        counted: Counter[str] = Counter()
        for name, info in self._tensors.items():
            counted[self._weights[name].kind if name in self._weights else ""] += math.prod(info.shape)
        return {kind: count / max(1, counted.total()) for kind, count in sorted(counted.items()) if kind}

    def stored_name(self, name: str) -> str:
        weight = self._weights.get(name)
        return name if weight is None or weight.main == WEIGHT else f"{name} (stored as {weight.main})"

    def rows(self, name: str) -> Rows | None:
        """None if the tensor is not quantized."""
        weight = self._weights.get(name)
        return None if weight is None else weight.expand()

    def _take(self, module: Module, weight: StoredWeight, problems: list[str]) -> None:
        name, separator = f"{module.name}{self._format.weight_suffix}", self._format.separator
        if weight.main != WEIGHT and WEIGHT in module.tensors:
            problems.append(f"{module.name}: it has both {WEIGHT} and {weight.main}")
        for part in (weight.main, *weight.others):
            del self._tensors[f"{module.name}{separator}{part}"]
        self._tensors[name] = TensorInfo("float32", weight.shape, 4 * math.prod(weight.shape))
        self._weights[name] = weight
        if BIAS in module.tensors and not module.read(BIAS).any():
            self._surplus.add(f"{module.name}.{BIAS}")


def _modules(stored: Mapping[str, TensorInfo], read: Callable[[str], Tensor], separator: str) -> list[Module]:
    parts: defaultdict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, info in stored.items():
        module, _, part = name.rpartition(separator)
        if module:
            parts[module][part] = info
    return [Module(name, own, _reader(name + separator, read)) for name, own in parts.items()]


def _reader(prefix: str, read: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    return lambda part: read(f"{prefix}{part}")


def _part(name: str) -> str:
    return name.rpartition(".")[2]
