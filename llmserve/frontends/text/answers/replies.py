"""Parts of replies that OpenAI's APIs share, and the common answers of completions and chats."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fastapi import Response

from llmserve.frontends.http.error_answers import JSON
from llmserve.frontends.http.json_fields import Json
from llmserve.frontends.text.answers.event_stream import DONE, Template, data, encoded_slowly
from llmserve.frontends.text.answers.generation import Answer, Caller, Piece, Usage
from llmserve.frontends.text.answers.log_probs import Scored, prompt_log_probs, scored_prompt, with_top

if TYPE_CHECKING:
    from llmserve.frontends.text.requests.ensembles import Ensemble, Values
    from llmserve.frontends.text.requests.fields import Sampled
    from llmserve.frontends.text.state import ApiState

LIMITS = ("length", "timed_out")  # finish reasons of an answer that was cut off
NOTHING: Mapping[str, Json] = {}
NOT_ASKED: dict[str, Json] = {"prompt_token_ids": None, "prompt_logprobs": None}  # vLLM's clients expect them
TokenLists = Sequence[Sequence[Scored]]  # one for each choice


def new_id(prefix: str, separator: str = "-") -> str:
    return f"{prefix}{separator}{secrets.token_hex(12)}"


def finish_reason(reason: str, *, has_called: bool = False) -> str | None:
    """OpenAI's finish reason for TensorRT-LLM's; None while the answer continues."""
    if not reason:
        return None
    if reason in LIMITS:
        return "length"
    return "tool_calls" if has_called else "stop"


def usage_document(usage: Usage | None) -> Json:
    if usage is None:
        return None
    details: dict[str, Json] = {} if usage.reasoning is None else {"reasoning_tokens": usage.reasoning}
    if usage.drafted:
        details["accepted_prediction_tokens"] = usage.accepted
        details["rejected_prediction_tokens"] = usage.drafted - usage.accepted
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        **({"completion_tokens_details": details} if details else {}),
    }


def document_head(prefix: str, kind: str, model: str, fingerprint: str | None) -> dict[str, Json]:
    head = {"id": new_id(prefix), "object": kind, "created": int(time.time()), "model": model}
    return head | {"system_fingerprint": fingerprint}


def ending_fields(last: Piece) -> dict[str, Json]:
    """The last fields of a choice: a receipt, if requested, and vLLM's `stop_reason`."""
    receipt: dict[str, Json] = {} if last.receipt is None else {"receipt": last.receipt}
    return receipt | ({"stop_reason": last.stop_word} if last.stop_word else {})


def extra_fields(last: Piece) -> dict[str, Json]:
    """Fields next to the choices of an answer, or of its last chunk."""
    found = {"warning": last.warning or None, "timings": last.timings}
    return {name: value for name, value in found.items() if value is not None}


def with_extras(document: dict[str, Json], lasts: Iterable[Piece]) -> dict[str, Json]:
    """A whole answer with extra fields from the last pieces of its choices; for each field, the first choice counts."""
    for last in reversed([*lasts]):
        document |= extra_fields(last) | ({} if last.metrics is None else {"metrics": last.metrics})
    return document


async def scored_reply(
    state: ApiState,
    caller: Caller,
    ensemble: Ensemble,
    found: Sequence[Answer],
    scored: Callable[[], TokenLists],
    document: Callable[[TokenLists, Mapping[int, bytes]], Json],
) -> Response:
    """A reply with log probs. Work that may be slow runs in a thread."""
    tokens = await caller.beside_loop(scored, found)
    texts = await state.token_texts.of(ensemble, (one for each in tokens for one in each))
    content = await caller.beside_loop(lambda: encoded_slowly(document(tokens, texts)), found)
    return Response(content, media_type=JSON)


async def prompt_members(
    state: ApiState, ensemble: Ensemble, prompt: Values, body: Sampled, found: Sequence[Answer] = ()
) -> dict[str, Json]:
    """The requested members about a prompt's tokens; `found`: its answers, which contain its log probs."""
    if not body.return_token_ids and (body.prompt_logprobs is None or not found):
        return {}
    ids = await state.ensembles.prompt_ids(ensemble, prompt)
    members: dict[str, Json] = {"prompt_token_ids": ids} if body.return_token_ids else {}
    if body.prompt_logprobs is not None and found:
        tokens = scored_prompt([answer.pieces[0].arrays for answer in found], ids)
        tokens = with_top(tokens, body.prompt_logprobs)
        members["prompt_logprobs"] = prompt_log_probs(tokens, await state.token_texts.of(ensemble, tokens))
    return members


@dataclass(slots=True)
class Chunks:
    """The events of one stream of choices, and its usage."""

    head: Mapping[str, Json]
    wants_usage: bool
    total: Usage | None = field(default_factory=Usage)  # None: the ensemble does not count tokens
    running: Usage | None = None  # so far, if every chunk reports it
    metrics: Json = None  # of the latest choice, reported with the usage

    @property
    def _rest(self) -> dict[str, Json]:
        if self.running is not None:
            return {"usage": usage_document(self.running)}
        return {"usage": None} if self.wants_usage else {}

    def grow(self, piece: Piece) -> None:
        """Count the tokens of a piece, if every chunk reports the usage so far."""
        if self.running is not None:
            ids = piece.arrays.get("output_token_ids")
            self.running = replace(self.running, completion=self.running.completion + (0 if ids is None else ids.size))

    def chunk(self, choice: Json, members: Mapping[str, Json] = NOTHING) -> bytes:
        """`members` are next to the choices."""
        return data({**self.head, "choices": [choice], **self._rest, **members})

    def template(self, choice: Json) -> Template:
        return Template(data, {**self.head, "choices": [choice], **self._rest})

    def count(self, piece: Piece) -> None:
        """Add the usage of an answer's last piece. For several answers to one prompt, the prompt counts once."""
        self.metrics = piece.metrics
        if self.total is None or piece.usage is None:
            self.total = None
        else:
            self.total += piece.usage if piece.index == 0 else replace(piece.usage, prompt=0, cached=0)

    def end(self) -> Iterator[bytes]:
        if self.wants_usage:
            more: Mapping[str, Json] = NOTHING if self.metrics is None else {"metrics": self.metrics}
            yield data({**self.head, "choices": [], "usage": usage_document(self.total), **more})
        yield DONE
