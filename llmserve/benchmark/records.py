"""A request of a load, its result, and the interface that sends it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

Prompt: TypeAlias = str | Sequence[Mapping[str, str]]  # text, or chat messages with `role` and `content`


@dataclass(frozen=True, slots=True)
class LoadRequest:
    prompt: Prompt
    max_tokens: int


@dataclass(slots=True)
class Record:
    """Times are those of `time.perf_counter`. A request without `error` and with an arrival was answered."""

    due: float | None = None  # when it should have been sent; None: when the previous answer ended
    started: float = 0.0
    arrived: list[float] = field(default_factory=list)  # times of the pieces of text
    prompt_tokens: int | None = None  # this and the next four are counted by the server
    cached_tokens: int | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    completion_tokens: int | None = None
    error: str = ""  # its kind: a few words, equal for equal errors
    message: str = ""  # the server's message for the error
    is_unreachable: bool = False  # whether the error is that there was no server
    is_cut: bool = False  # whether it was unfinished when the time was over

    def fail(self, kind: str, message: str = "", *, is_unreachable: bool = False) -> None:
        """Only the first failure is recorded."""
        if not self.error:
            self.error, self.message, self.is_unreachable = kind, message, is_unreachable

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer, or its pieces if the server does not count tokens."""
        return len(self.arrived) if self.completion_tokens is None else self.completion_tokens

    @property
    def time_to_first_token(self) -> float:
        return self.arrived[0] - self.started

    @property
    def latency(self) -> float:
        """Seconds until the last text; an event with only token counts is ignored."""
        return self.arrived[-1] - self.started

    @property
    def inter_token_latency(self) -> float | None:
        """The mean of this answer; None if it has only one token."""
        if self.num_tokens < 2:
            return None
        return (self.arrived[-1] - self.arrived[0]) / (self.num_tokens - 1)


class Endpoint(Protocol):
    """A model of a server, and the protocol to send requests to it."""

    async def ask(self, request: LoadRequest, record: Record) -> None:
        """Fills in the record while the answer arrives, including any error; never raises one."""
        ...

    async def close(self) -> None: ...
