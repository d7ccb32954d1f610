"""The model `tensorrt_llm` of an engine that makes embeddings or scores: requests, outputs, and what does not fit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from llmserve.backends.tensorrtllm.pooling import check_kind, pooled_outputs, pooled_request
from llmserve.core import FinishReason, GenerateRequest, TokenEvent, Usage
from llmserve.engine.base import Engine, EngineInfo
from llmserve.errors import DeadlineExceeded, InvalidArgument, ModelConfigError, PromptTooLong
from llmserve.serving.types import Tensor

INFO = EngineInfo("mini", "cpu", "BertModel", "float16", "", 100, 8, 4, 8, pooling="embeddings", output_width=3)
SCORES = replace(INFO, pooling="scores", output_width=1, scores_with_sigmoid=True)
USAGE = Usage(2, 0, 0, 1, 1, 1, 1)


class OneAnswer:
    """An engine whose every text has one row; none: the deadline is over."""

    def __init__(self, info: EngineInfo, *row: float) -> None:
        self.info, self._row = info, row

    async def submit(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        logits = (np.array(self._row, np.float32),) if self._row else ()
        yield TokenEvent((), finish_reason=FinishReason.LENGTH, usage=USAGE, logits=logits)


def inputs(*ids: int, second: int | None = None) -> dict[str, Tensor]:
    found = {"input_ids": Tensor("input_ids", "INT32", np.array([ids], np.int32))}
    if second is not None:
        found["second_segment"] = Tensor("second_segment", "INT32", np.array([second], np.int32))
    return found


def answered(info: EngineInfo, *row: float, requested: tuple[str, ...] = ()) -> dict[str, Any]:
    engine = cast(Engine, OneAnswer(info, *row))
    told: list[Usage] = []
    made = asyncio.run(pooled_outputs(engine, pooled_request(inputs(1, 2), info, "r"), requested, told.append))
    assert told == [USAGE]
    return {tensor.name: tensor.data.tolist() for tensor in made}


def test_an_embedding_is_the_engines_row() -> None:
    assert answered(INFO, 0.5, -1, 2) == {"embedding": [[0.5, -1, 2]], "num_prompt_tokens": [[2]]}


@pytest.mark.parametrize(("logit", "score"), [(0.0, 0.5), (1000.0, 1.0), (-1000.0, 0.0)])
def test_a_score_is_between_0_and_1_where_the_checkpoint_says_so(logit: float, score: float) -> None:
    assert answered(SCORES, logit)["score"] == [[score]]
    assert answered(replace(SCORES, scores_with_sigmoid=False), logit)["score"] == [[logit]]


def test_requests_that_cannot_be_are_refused() -> None:
    assert pooled_request(inputs(*range(8), second=3), INFO, "r").second_segment == 3
    with pytest.raises(PromptTooLong, match="the text has 9 tokens, but this engine takes at most 8; shorten it"):
        pooled_request(inputs(*range(9)), INFO, "r")
    batch = {"input_ids": Tensor("input_ids", "INT32", np.zeros((2, 3), np.int32))}
    with pytest.raises(InvalidArgument, match=r"input_ids must have shape \[1, N\] \(a batch of one\), got \[2, 3\]"):
        pooled_request(batch, INFO, "r")
    with pytest.raises(InvalidArgument, match="engine mini makes embeddings: it has no output score"):
        answered(INFO, 1.0, requested=("score", "embedding"))
    with pytest.raises(DeadlineExceeded):
        answered(INFO)


def test_a_repository_of_another_kind_is_refused_by_name() -> None:
    check_kind(INFO, "m", ["embedding"])
    check_kind(replace(INFO, pooling=""), "m", ["output_ids"])
    with pytest.raises(ModelConfigError, match="mini makes embeddings, so the model's outputs must be embedding"):
        check_kind(INFO, "m", ["output_ids"])
    with pytest.raises(ModelConfigError, match="engine mini makes tokens, so the model's outputs must be output_ids"):
        check_kind(replace(INFO, pooling=""), "m", ["embedding", "score"])
