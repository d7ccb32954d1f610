"""The speed that a machine's measured limits allow in a cell. A step reads every weight once, and each sequence's
cache. It multiplies every weight once per token. With experts, only the experts that its tokens choose count."""

from __future__ import annotations

from dataclasses import dataclass

from tools.benchmark.cells import Cell
from tools.benchmark.contestants import Contestant
from tools.benchmark.shapes import Shape


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured rates, per second."""

    read_bytes: float
    products: float  # multiply-adds of floats
    products_int8: float


@dataclass(frozen=True, slots=True)
class Bounds:
    """Tokens per second that each limit alone allows."""

    reading: float
    multiplying: float

    @property
    def nearer(self) -> float:
        return min(self.reading, self.multiplying)


def bounds(
    cell: Cell, contestant: Contestant, shape: Shape, limits: Limits, *, weight_bytes: int, kv_bytes_per_token: float
) -> Bounds:
    """`weight_bytes`: bytes that a step of one token reads."""
    products_per_s = limits.products_int8 if contestant.multiplies_int8 else limits.products
    if cell.phase == "prefill":
        tokens = cell.batch * cell.prompt_tokens
        products = tokens * shape.layer_products + cell.batch * shape.head_products
        read_bytes = weight_bytes * shape.weights_read(tokens)
    else:
        tokens = cell.batch
        products = tokens * (shape.layer_products + shape.head_products)
        read_bytes = weight_bytes * shape.weights_read(tokens) + cell.batch * cell.mean_context * kv_bytes_per_token
    return Bounds(tokens * limits.read_bytes / read_bytes, tokens * products_per_s / products)
