from __future__ import annotations

import json
from typing import Any

import pytest

from llmserve.core import FinishReason, GenerateRequest, SamplingParams
from llmserve.engine.base import EngineInfo
from llmserve.errors import InvalidArgument
from llmserve.stages.guides import GuideKind, GuideText
from llmserve.stages.receipt import AskedTokens, Receipt

ENGINE = EngineInfo("tiny", "cpu", "Llama", "float16", "d" * 64, 100, 64, 4, 64, kernels="avx512")
REQUEST = GenerateRequest(
    "mine", (1, 2, 3), SamplingParams(max_tokens=7, temperature=0.5, top_p=0.25, seed=2**64 - 1), end_id=2,
    stop_ids=((4, 5), (6,)), bad_ids=((7,),), embedding_bias=((8, -0.5),), num_sequences=3,
)  # fmt: skip
ASKED = AskedTokens(REQUEST, GuideText(GuideKind.REGEX, "a+"), ("\n", "。"))
RECEIPT = Receipt.of(ENGINE, ASKED, 2, [9, 10], "tail", FinishReason.STOP_WORDS)


def test_nothing_of_a_receipt_is_lost_in_json() -> None:
    read = Receipt.read(json.loads(RECEIPT.text()))
    assert read.document() == RECEIPT.document()
    assert read.engine == {"name": "tiny", "digest": "d" * 64, "target": "cpu", "kernels": "avx512"}
    request = read.asked.generate
    for name in ("prompt_ids", "sampling", "end_id", "stop_ids", "bad_ids", "embedding_bias", "num_sequences"):
        assert getattr(request, name) == getattr(REQUEST, name), name
    assert (read.asked.guide, read.asked.stop_strings) == (ASKED.guide, ASKED.stop_strings)
    assert (read.sequence_index, read.output_ids, read.tail_text) == (2, (9, 10), "tail")
    assert read.finish_reason is FinishReason.STOP_WORDS


def test_the_defaults_are_kept_too() -> None:
    plain = Receipt.of(ENGINE, AskedTokens(GenerateRequest("r", (1,))), 0, [], "", FinishReason.LENGTH)
    assert Receipt.read(json.loads(plain.text())).asked.generate.end_id is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt_ids": [1, "2"]}, "prompt_ids must be token ids"),
        ({"prompt_ids": [True]}, "prompt_ids must be token ids"),
        ({"output_ids": None}, "output_ids must be a list, got None"),
        ({"end_id": "2"}, "end_id must be an integer, got '2'"),
        ({"stop_ids": [1]}, "stop_ids must be lists of token ids"),
        ({"embedding_bias": [[1]]}, "embedding_bias must be [id, bias] pairs"),
        (
            {"guide": {"kind": "poem", "text": ""}},
            "guide must have a text and a kind, one of json, json_schema",
        ),
        ({"engine": {"name": "x"}}, "engine must have name, digest, target, kernels as strings"),
        ({"sequence_index": 3}, "sequence_index 3 must be below 3"),
        ({"finish_reason": "boredom"}, "finish_reason must be one of end_id"),
        ({"stop_strings": [1]}, "stop_strings must be strings"),
        ({"sampling": {}}, "sampling.max_tokens must be an integer"),
        ({"sampling": RECEIPT.document()["sampling"] | {"luck": 1}}, "sampling.luck is unknown"),
        ({"sampling": RECEIPT.document()["sampling"] | {"top_p": 2}}, "top_p must be in (0, 1], got 2.0"),
    ],
)
def test_what_is_wrong_with_a_receipt_is_said(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        Receipt.read(RECEIPT.document() | changes)
    assert words in str(error.value)


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(InvalidArgument) as error:
        Receipt.read(RECEIPT.document() | {"prompt_ids": 1, "output_ids": 2, "tail_text": 3})
    assert all(name in str(error.value) for name in ("prompt_ids", "output_ids", "tail_text"))


@pytest.mark.parametrize("document", [None, [], 5, {}, {"format": 2}])
def test_another_thing_is_no_receipt(document: object) -> None:
    with pytest.raises(InvalidArgument, match="not a receipt of format 1"):
        Receipt.read(document)
