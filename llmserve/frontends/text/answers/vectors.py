"""Computes the vectors of many texts of one request, a limited number of them at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmserve.at_once import at_once
from llmserve.core import POOLING
from llmserve.errors import LlmserveError
from llmserve.frontends.http.json_fields import Json
from llmserve.frontends.text.answers.failures import Refused
from llmserve.frontends.text.answers.generation import Caller
from llmserve.frontends.text.requests.ensembles import Ensemble, Values

AT_ONCE = 64  # texts of one request; the others of a long list wait
SMALLEST_NORM = 1e-12
JSON_BYTES = 24  # memory of a number in JSON, and during its conversion


@dataclass(frozen=True, slots=True)
class Vectors:
    rows: Sequence[NDArray[np.float32]]
    num_tokens: int  # of all texts
    ignored: Sequence[str]  # notes on ignored fields of the request

    def warning(self) -> dict[str, Json]:
        return {"warning": "; ".join(self.ignored)} if self.ignored else {}


async def vectors(caller: Caller, ensemble: Ensemble, texts: Sequence[Values], output: str, field: str) -> Vectors:
    """The vectors of `texts`, in order. The first error ends all, and names the entry of the request's `field`."""

    async def one(index: int) -> tuple[NDArray[Any], int]:
        try:
            return await caller.vector(ensemble, texts[index], output)
        except Refused:
            raise
        except LlmserveError as error:
            raise error.at(f"{field}[{index}]" if len(texts) > 1 else field) from error

    found = await at_once(one, range(len(texts)), caller.most_at_once(most=AT_ONCE))
    return Vectors([row for row, _ in found], sum(count for _, count in found), caller.notes.texts)


def pooling_of(caller: Caller, ensemble: Ensemble) -> dict[str, Any]:
    """The engine's facts about pooling; empty if unknown."""
    return dict(caller.core.facts(ensemble.name).get(POOLING, {}))


def check_makes(caller: Caller, ensemble: Ensemble, wanted: str, instead: str) -> None:
    """Raises `Refused` if the engine is known to make another result than `wanted`."""
    if (makes := pooling_of(caller, ensemble).get("makes", wanted)) != wanted:
        raise Refused(f"model '{ensemble.name}' makes {makes}, not {wanted}; use {instead}", "model")


def check_dimensions(caller: Caller, ensemble: Ensemble, dimensions: int | None) -> None:
    """Raises `Refused` unless embeddings can be shortened to this many numbers."""
    known = pooling_of(caller, ensemble)
    width, allowed = known.get("width"), known.get("dimensions", ())
    if dimensions is None or dimensions == width:
        return
    if allowed is True:
        if width is None or dimensions < width:
            return
        raise Refused(f"dimensions must be at most {width}, the length of an embedding", "dimensions")
    if dimensions not in allowed:
        choice = f"it may be {', '.join(map(str, allowed))}" if allowed else "its embeddings cannot be shortened"
        raise Refused(f"dimensions {dimensions} is not supported: {choice}, and have {width} numbers", "dimensions")


def cut(row: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
    """The first `dimensions` numbers, scaled to length 1."""
    if dimensions is None or dimensions == len(row):
        return row
    first = row[:dimensions].astype(np.float64)
    shorter: NDArray[np.float32] = (first / max(np.sqrt(np.square(first).sum()), SMALLEST_NORM)).astype(np.float32)
    return shorter
