"""An engine that says what it is told to, in the portions that it is told to."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace

from llmserve.core import FinishReason, GenerateRequest, TokenEvent, Usage
from llmserve.engine.base import EngineInfo, EngineStats


@dataclass
class ScriptedEngine:
    """`portions[i]` are the ids of the i-th event; log-prob of every token is -1. `events` replaces all of that.

    The first event has usage as far as it is known then, the last one all of it.
    """

    portions: Sequence[Sequence[int]] = ()
    finish: FinishReason = FinishReason.LENGTH
    events: Sequence[TokenEvent] = ()
    num_sent: int = 0
    closed: bool = False
    requests: list[GenerateRequest] = field(default_factory=list)

    @property
    def info(self) -> EngineInfo:
        return EngineInfo("scripted", "fake", "Scripted", "int", "0", 10_000, 512, 8, 64)

    def submit(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        self.requests.append(request)
        return self._stream(request)

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        try:
            for event in self.events or self._scripted(request):
                self.num_sent += 1
                yield event
        finally:
            self.closed = True

    def _scripted(self, request: GenerateRequest) -> list[TokenEvent]:
        events, count = [], 0
        for portion in self.portions:
            count += len(portion)
            events.append(TokenEvent(tuple(portion), (-1.0,) * len(portion), float(-count)))
        usage = Usage(len(request.prompt_ids), 2, count, 1, 2, 3, 4)
        if events:
            events[0] = replace(events[0], usage=replace(usage, completion_tokens=len(events[0].token_ids)))
        return [*events, TokenEvent((), (), float(-count), finish_reason=self.finish, usage=usage)]

    def stats(self) -> EngineStats:
        return EngineStats(tokens_per_block=4, max_num_blocks=100, free_num_blocks=90, used_num_blocks=10)

    def healthy(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True
