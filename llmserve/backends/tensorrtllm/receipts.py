"""Collects receipts of one request's answers: ids are gathered as they are sent."""

from __future__ import annotations

from llmserve.engine.base import EngineInfo
from llmserve.stages.generate import GeneratedEvent
from llmserve.stages.receipt import AskedTokens, Receipt


class Receipts:
    def __init__(self, engine: EngineInfo, asked: AskedTokens) -> None:
        self._engine = engine
        self._asked = asked
        self._ids: dict[int, list[int]] = {}  # by sequence

    def take(self, event: GeneratedEvent) -> str:
        """The receipt of the sequence that ends with this event, as JSON; empty before its end."""
        tokens = event.tokens
        ids = self._ids.setdefault(tokens.sequence_index, [])
        ids += tokens.token_ids
        if tokens.finish_reason is None:
            return ""
        return Receipt.of(
            self._engine, self._asked, tokens.sequence_index, ids, event.tail_text, tokens.finish_reason
        ).text()
