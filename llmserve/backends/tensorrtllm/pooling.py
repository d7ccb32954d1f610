"""Requests to an engine that produces embeddings or scores: one text and one response each."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np

from llmserve.core import SCORES, GenerateRequest, Logits, SamplingParams, Usage
from llmserve.engine.base import Engine, EngineInfo
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.errors import DeadlineExceeded, InvalidArgument, ModelConfigError, PromptTooLong
from llmserve.serving.types import Tensor

EMBEDDING, SCORE, NUM_TOKENS = "embedding", "score", "num_prompt_tokens"
WIDTHS = ("matryoshka_dimensions", "is_matryoshka")  # of config.json


def check_kind(info: EngineInfo, name: str, outputs: Collection[str]) -> None:
    """Raises `ModelConfigError` unless the model's outputs are those of the engine."""
    is_pooling = EMBEDDING in outputs or SCORE in outputs
    if is_pooling == bool(info.pooling):
        return
    makes, wanted = info.pooling or "tokens", f"{EMBEDDING} and {SCORE}" if info.pooling else "output_ids"
    raise ModelConfigError(
        f"model '{name}': engine {info.name} makes {makes}, so the model's outputs must be {wanted}; "
        "`llmserve serve ENGINE` chooses a repository that fits"
    )


def pooling_facts(info: EngineInfo, engine_dir: Path) -> Mapping[str, Any]:
    """What clients are told; `dimensions`: lengths to which an embedding may be shortened, true for any."""
    if not info.pooling:
        return {}
    config = EngineDirectory.open(engine_dir).hf_config
    cut = next((config[name] for name in WIDTHS if config.get(name)), None)
    found: dict[str, Any] = {"makes": info.pooling, "width": info.output_width, "max_tokens": info.max_seq_len}
    return {**found, "dimensions": cut} if cut is True or isinstance(cut, list) else found


def made_outputs(info: EngineInfo) -> Collection[str]:
    return (SCORE if info.pooling == SCORES else EMBEDDING, NUM_TOKENS)


def pooled_request(inputs: Mapping[str, Tensor], info: EngineInfo, request_id: str) -> GenerateRequest:
    ids, second = inputs["input_ids"].data, inputs.get("second_segment")
    if ids.size != ids.shape[-1]:
        raise InvalidArgument(f"input_ids must have shape [1, N] (a batch of one), got {list(ids.shape)}")
    if ids.size > info.max_seq_len:  # before so many ids are checked
        problem = f"the text has {ids.size} tokens, but this engine takes at most {info.max_seq_len}; shorten it"
        raise PromptTooLong(problem, num_tokens=ids.size, limit=info.max_seq_len)
    return GenerateRequest(
        request_id,
        tuple(ids.reshape(-1).tolist()),
        SamplingParams(max_tokens=1),
        pooled=True,
        second_segment=0 if second is None or not second.data.size else int(second.data.reshape(-1)[0]),
        speculation=False,
    )


async def pooled_outputs(
    engine: Engine, job: GenerateRequest, requested: Collection[str], ended: Callable[[Usage], None]
) -> tuple[Tensor, ...]:
    """`ended` receives the engine's counts."""
    info = engine.info
    if unknown := sorted(set(requested) - set(made_outputs(info))):
        raise InvalidArgument(f"engine {info.name} makes {info.pooling}: it has no output {', '.join(unknown)}")
    async with aclosing(engine.submit(job)) as events:
        async for event in events:
            if event.logits and event.usage is not None:
                ended(event.usage)
                return _tensors(info, event.logits[0], event.usage)
    raise DeadlineExceeded("the deadline passed before the text was computed")


def _tensors(info: EngineInfo, row: Logits, usage: Usage) -> tuple[Tensor, ...]:
    if info.scores_with_sigmoid:
        row = np.array([_sigmoid(float(row[0]))], np.float32)
    name, count = made_outputs(info)
    number = np.array([[usage.prompt_tokens]], np.int32)
    return Tensor(name, "FP32", row.reshape(1, -1)), Tensor(count, "INT32", number)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
