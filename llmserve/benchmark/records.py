"""A request of a load, what came of it, and who answers."""

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
    """Times are those of `time.perf_counter`. A request without `error` and with an arrival has been answered."""

    due: float | None = None  # when it should have been sent; None: when another one was answered
    started: float = 0.0
    arrived: list[float] = field(default_factory=list)  # when each piece of text came
    prompt_tokens: int | None = None  # this and the next four as the server counts them
    cached_tokens: int | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    completion_tokens: int | None = None
    error: str = ""  # its kind: few words, the same for errors that are alike
    message: str = ""  # what the server said of it
    is_unreachable: bool = False  # the error: there was no server
    is_cut: bool = False  # it was unfinished when time was up

    def fail(self, kind: str, message: str = "", *, is_unreachable: bool = False) -> None:
        """The first failure counts."""
        if not self.error:
            self.error, self.message, self.is_unreachable = kind, message, is_unreachable

    @property
    def num_tokens(self) -> int:
        """Of the answer; where the server does not count them, pieces are taken for tokens."""
        return len(self.arrived) if self.completion_tokens is None else self.completion_tokens

    @property
    def time_to_first_token(self) -> float:
        return self.arrived[0] - self.started

    @property
    def latency(self) -> float:
        """Until the last text: an event that only counts tokens is not waited for."""
        return self.arrived[-1] - self.started

    @property
    def inter_token_latency(self) -> float | None:
        """The mean within this answer; None for an answer of one token."""
        if self.num_tokens < 2:
            return None
        return (self.arrived[-1] - self.arrived[0]) / (self.num_tokens - 1)


class Endpoint(Protocol):
    """A server and a model, and how they are asked."""

    async def ask(self, request: LoadRequest, record: Record) -> None:
        """Fill in the record while the answer comes. What goes wrong is in the record, too; raises nothing."""
        ...

    async def close(self) -> None: ...
