"""Measures how many tokens a word has, for prompts of a given length: counted here, or by the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llmserve.benchmark.records import Endpoint, LoadRequest, Record
from llmserve.benchmark.workload import WORDS, Writer

GUESS = 1.3  # tokens per English word, if unknown
TAKEN = f"those made here are taken to have {GUESS:g} tokens a word"
FEW_WORDS = 16


class Calibrated(NamedTuple):
    writer: Writer
    failed: Record | None  # the request that the server did not answer
    note: str = ""


def counted_writer(count: Callable[[str], int]) -> Writer:
    """Writes exact lengths: `count` is that of the model's tokenizer."""
    return Writer(count(" ".join(WORDS)) / len(WORDS), count)


async def asked_writer(endpoint: Endpoint) -> Calibrated:
    """Sends two prompts that differ by all of WORDS, so that the tokens of the chat format cancel out."""
    counts: list[int] = []
    for words in (WORDS[:FEW_WORDS], (*WORDS[:FEW_WORDS], *WORDS)):
        record = Record()
        await endpoint.ask(LoadRequest(" ".join(words), 1), record)
        if record.error:
            return Calibrated(Writer(GUESS), record)
        if record.prompt_tokens is None:
            return Calibrated(Writer(GUESS), None, f"the server does not count tokens: {TAKEN}")
        counts.append(record.prompt_tokens)
    per_word = (counts[1] - counts[0]) / len(WORDS)
    if per_word < 0.5:  # the server may truncate a prompt that does not fit
        return Calibrated(Writer(GUESS), None, f"the server cuts prompts: {TAKEN}")
    return Calibrated(Writer(per_word), None)
