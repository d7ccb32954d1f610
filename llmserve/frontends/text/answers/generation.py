"""Sends one prompt to an ensemble, and converts its responses to pieces of an answer, for all text APIs."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmserve.core import Tenant
from llmserve.errors import InvalidArgument
from llmserve.frontends.http.bodies import off_loop
from llmserve.frontends.http.json_fields import Json
from llmserve.frontends.shared.extension_state import Extensions
from llmserve.frontends.shared.forwarded_headers import accompanied
from llmserve.frontends.shared.request_context import name_model
from llmserve.frontends.shared.server_core import Core, single_response
from llmserve.frontends.text.requests.ensembles import Ensemble, Values
from llmserve.frontends.text.requests.notes import Notes
from llmserve.serving.instruments.trace import Trace
from llmserve.serving.types import ADAPTER_NAME, InferRequest, ParameterValue
from llmserve.wire.http1.request import Request

Result = TypeVar("Result")
Arrays = Mapping[str, NDArray[Any]]
NO_LIMIT = 2**31 - 1  # of tokens: the engine's own limit applies
NO_END = -1
AT_ONCE = 32  # concurrent prompts of one request; the others wait outside of the queue that all requests share
ENTRY_BYTES = 64  # memory of an id or a log prob in JSON, and during its conversion
UNKNOWN_END = "end_id"  # for an ensemble without finish reasons
TEXT = (
    "text_output", "finish_reason", "num_prompt_tokens", "num_cached_tokens", "num_completion_tokens", "warning",
    "stop_word",
)  # fmt: skip
TIMES = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")
DRAFTS = ("total_draft_tokens", "total_accepted_draft_tokens")
NUM_TOKENS = "num_prompt_tokens"
TOKENS = (
    "output_token_ids", "output_log_probs", "cum_log_probs", "output_top_ids", "output_top_log_probs",
    "prompt_log_probs", "prompt_top_ids", "prompt_top_log_probs",
)  # fmt: skip
LOGITS = "generation_logits"


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens. For several answers to one prompt, the prompt counts once."""

    prompt: int = 0
    cached: int = 0  # tokens of the prompt that were in the cache
    completion: int = 0
    reasoning: int | None = None  # part of the completion; None: the model does not reason
    drafted: int | None = None  # for speculation; None: not counted
    accepted: int = 0  # drafted tokens that were accepted

    def __add__(self, other: Usage) -> Usage:
        drafted = [each.drafted for each in (self, other) if each.drafted is not None]
        thought = [each.reasoning for each in (self, other) if each.reasoning is not None]
        return Usage(
            self.prompt + other.prompt,
            self.cached + other.cached,
            self.completion + other.completion,
            sum(thought) if thought else None,
            sum(drafted) if drafted else None,
            self.accepted + other.accepted,
        )


@dataclass(slots=True)
class Piece:
    """The part of an answer in one response."""

    text: str
    finish_reason: str = ""  # TensorRT-LLM's; empty while the answer continues
    index: int = 0  # of the answer, among the answers to one prompt
    usage: Usage | None = None  # in the last piece of an answer
    warning: str = ""
    receipt: Json = None  # in the last piece, if requested
    stop_word: str = ""  # in the last piece: the stop word that was found, if known
    timings: Json = None  # in the last piece, if requested
    metrics: Json = None  # in the last piece, if requested
    times_ns: Sequence[int] = ()  # TIMES, in the last piece, if requested
    arrays: Arrays = field(default_factory=dict)  # the requested outputs of TOKENS


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings in the terms of OpenAI's API: tokens are sampled unless the temperature is 0.

    None: the request does not set it, so the default of the checkpoint or of OpenAI's API applies.
    """

    max_tokens: int | None = None  # None: as many as fit
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None  # None: random
    num_answers: int = 1
    stop: Sequence[str] = ()
    more: Values = field(default_factory=dict)  # more inputs of the ensemble, by its names
    shows_stop: bool = False  # the answer includes the stop word that ended it
    wants_times: bool = False
    wants_metrics: bool = False
    scored_ids: Sequence[int] = ()  # tokens whose log probs replace those of the likeliest at each position
    warning: str = ""  # a note for the client on these settings

    def values(self) -> dict[str, Sequence[Any]]:
        """The settings as inputs of the ensemble, without those that equal its defaults."""
        values: dict[str, Sequence[Any]] = {"max_tokens": [self.max_tokens or NO_LIMIT], **self.more}
        if self.repetition_penalty not in (None, 1):
            values["repetition_penalty"] = [self.repetition_penalty]
        temperature = 1.0 if self.temperature is None else self.temperature
        if temperature > 0:
            values["temperature"] = [temperature]
            # without top_p and top_k, the ensemble would choose the likeliest token
            values["top_p"] = [1.0 if self.top_p is None else self.top_p]
            if self.top_k:
                values["top_k"] = [self.top_k]
            if self.min_p:
                values["min_p"] = [self.min_p]
            values["seed"] = [secrets.randbits(63) if self.seed is None else self.seed % 2**64]
        if self.num_answers > 1:
            values["num_return_sequences"] = [self.num_answers]
        if self.stop:
            values["stop_words"] = list(self.stop)
        return values

    def with_defaults(self, defaults: Mapping[str, float]) -> Sampling:
        """Fill unset fields from `defaults`, by name. With temperature 0, tokens are not sampled: nothing changes."""
        if self.temperature == 0:
            return self
        missing: dict[str, Any] = {name: each for name, each in defaults.items() if getattr(self, name) is None}
        return replace(self, **missing)


@dataclass(frozen=True, slots=True)
class Caller:
    """The origin of a request: the wire's request, for forwarded headers and traces, and its tenant."""

    core: Core
    extensions: Extensions
    request: Request
    tenant: Tenant
    notes: Notes  # of the request

    def most_at_once(self, num_answers: int = 1, most: int = AT_ONCE) -> int:
        """The concurrent prompts of one request, with `num_answers` each, within the limit of its API key."""
        allowed = self.tenant.max_answers // num_answers
        return min(most, max(1, allowed)) if self.tenant.max_answers else most

    async def pieces(
        self,
        ensemble: Ensemble,
        prompt: Values,
        sampling: Sampling,
        *,
        streaming: bool,
        wants_tokens: bool = False,
        counts_drafts: bool = False,
    ) -> AsyncGenerator[Piece, None]:
        """The answers to one prompt, interleaved; each ends with a piece that has a finish reason.

        Without `streaming`, each answer is one piece, unless logits are read. `counts_drafts`: also in a stream.
        May raise `LlmserveError` at any time.
        """
        name_model(ensemble.adapter or ensemble.name)
        streaming = streaming or bool(sampling.scored_ids)  # rows of logits are large, so each is read as it comes
        outputs = (
            *(TOKENS if wants_tokens else ()), *(TIMES if sampling.wants_times or sampling.wants_metrics else ()),
            *(DRAFTS if counts_drafts or not streaming else ()), *((LOGITS,) if sampling.scored_ids else ()),
        )  # fmt: skip
        asked = _infer_request(ensemble, {**prompt, **sampling.values()}, streaming, outputs)
        trace = self._trace(ensemble.name)
        headers = self.extensions.http_headers.chosen(self.request.header_items)
        asked = accompanied(asked, trace, headers, self.tenant)
        hides_limit = sampling.max_tokens is None
        try:
            async with aclosing(self.core.infer_stream(asked)) as responses:
                async for response in responses:
                    if response.error is not None:
                        raise response.error
                    if response.outputs:
                        found: Arrays = {tensor.name: tensor.data for tensor in response.outputs}
                        if sampling.scored_ids:
                            found = _with_scores(found, sampling.scored_ids)
                        piece = _piece(found, wants_tokens=wants_tokens, hides_limit=hides_limit)
                        if sampling.wants_times and piece.times_ns:
                            piece.timings = _timings(piece.times_ns, piece.usage or Usage())
                        if sampling.wants_metrics and piece.times_ns:
                            piece.metrics = _metrics(piece.times_ns, piece.usage or Usage())
                        if sampling.shows_stop:
                            piece.text += piece.stop_word
                        yield self._warned(piece, sampling)
            if "finish_reason" not in ensemble.outputs:
                yield self._warned(Piece("", UNKNOWN_END), sampling)
        finally:
            if trace is not None:
                trace.stamp("HTTP_SEND_END")
                self.extensions.tracer.finish(ensemble.name, trace)

    async def vector(self, ensemble: Ensemble, values: Values, output: str) -> tuple[NDArray[Any], int]:
        """The ensemble's output for one text, and the text's number of tokens. Raises `LlmserveError`."""
        name_model(ensemble.adapter or ensemble.name)
        asked = InferRequest(
            ensemble.name, ensemble.tensors(values), requested_outputs=(output, NUM_TOKENS),
            parameters=_adapter_of(ensemble),
        )  # fmt: skip
        trace, headers = self._trace(ensemble.name), self.extensions.http_headers.chosen(self.request.header_items)
        try:
            response = await single_response(self.core, accompanied(asked, trace, headers, self.tenant))
        finally:
            if trace is not None:
                trace.stamp("HTTP_SEND_END")
                self.extensions.tracer.finish(ensemble.name, trace)
        if response.error is not None:
            raise response.error
        found = {tensor.name: tensor.data.reshape(-1) for tensor in response.outputs}
        return found[output], int(found[NUM_TOKENS][0])

    def _warned(self, piece: Piece, sampling: Sampling) -> Piece:
        if piece.finish_reason and piece.index == 0:
            piece.warning = "; ".join(filter(None, (*self.notes.texts, sampling.warning, piece.warning)))
        return piece

    async def beside_loop(self, work: Callable[[], Result], found: Iterable[Answer]) -> Result:
        """Do `work` on answers: here, or in a thread if their arrays are long."""
        size = ENTRY_BYTES * sum(a.size for answer in found for piece in answer.pieces for a in piece.arrays.values())
        self.request.share.grow(size)
        return await off_loop(self.request, work, size=size)

    def _trace(self, model: str) -> Trace | None:
        """A trace that begins after the body was received, because the body names the model."""
        trace = self.extensions.tracer.sample(model)
        if trace is not None:
            for moment in ("HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START"):
                trace.stamp(moment)
        return trace


def _infer_request(
    ensemble: Ensemble, values: Mapping[str, Sequence[Any]], streaming: bool, outputs: Sequence[str]
) -> InferRequest:
    values = dict(values)
    if streaming and "stream" in ensemble.inputs:
        values["stream"] = [True]
    if not streaming and "exclude_input_in_output" in ensemble.inputs:
        values["exclude_input_in_output"] = [True]
    more = {"num_return_sequences": "sequence_index", "return_receipt": "receipt"}
    wanted = (*TEXT, *(output for asked, output in more.items() if asked in values), *outputs)
    known = tuple([name for name in wanted if name in ensemble.outputs])
    chosen = _adapter_of(ensemble)
    return InferRequest(ensemble.name, ensemble.tensors(values), requested_outputs=known, parameters=chosen)


def _adapter_of(ensemble: Ensemble) -> dict[str, ParameterValue]:
    """The request parameter that names the ensemble's adapter, if it has one."""
    return {ADAPTER_NAME: ensemble.adapter} if ensemble.adapter else {}


def _piece(outputs: Arrays, *, wants_tokens: bool, hides_limit: bool) -> Piece:
    text: bytes = outputs["text_output"].item(0)
    piece = Piece(text.decode("utf-8", "replace"))
    if "sequence_index" in outputs:
        piece.index = outputs["sequence_index"].item(0)
    if wants_tokens:
        piece.arrays = outputs
    if "finish_reason" in outputs and (reason := outputs["finish_reason"].item(0)):
        piece.finish_reason = reason.decode()
        piece.usage = _usage(outputs)
        piece.warning = _warning(outputs, hides_limit)
        piece.stop_word = outputs["stop_word"].item(0).decode("utf-8", "replace") if "stop_word" in outputs else ""
        if all(name in outputs for name in TIMES):
            piece.times_ns = [outputs[name].item(0) for name in TIMES]
        if "receipt" in outputs:
            piece.receipt = json.loads(outputs["receipt"].item(0) or b"null")
    return piece


def _timings(times_ns: Sequence[int], usage: Usage) -> Json:
    """Timings in llama.cpp's format. The first token comes with the prompt; the time after it is for the others."""
    _, scheduled, first, last = times_ns
    computed = usage.prompt - usage.cached
    rows = (
        ("prompt", computed, computed, first - scheduled),
        ("predicted", usage.completion, max(0, usage.completion - 1), last - first),
    )
    found: dict[str, Json] = {"cache_n": usage.cached}
    for name, count, timed, duration_ns in rows:
        found |= {
            f"{name}_n": count,
            f"{name}_ms": duration_ns / 1e6,
            f"{name}_per_token_ms": duration_ns / 1e6 / timed if timed else 0.0,
            f"{name}_per_second": timed * 1e9 / duration_ns if duration_ns else 0.0,
        }
    return found


def _metrics(times_ns: Sequence[int], usage: Usage) -> Json:
    """Metrics in vLLM's format."""
    arrival, scheduled, first, last = (each / 1e6 for each in times_ns)
    found: dict[str, Json] = {
        "time_to_first_token_ms": first - arrival, "generation_time_ms": last - scheduled,
        "queue_time_ms": scheduled - arrival,
        "tokens_per_second": usage.completion * 1e3 / (last - scheduled) if last > scheduled else 0.0,
    }  # fmt: skip
    if usage.completion > 1:
        found["mean_itl_ms"] = (last - first) / (usage.completion - 1)
    return found


def _with_scores(outputs: Arrays, chosen: Sequence[int]) -> Arrays:
    """Log probs of `chosen` tokens instead of logits, in the outputs of the likeliest. Raises `InvalidArgument`."""
    logits = outputs[LOGITS].astype(np.float64)
    logits = logits.reshape(-1, logits.shape[-1])
    if logits.size and max(chosen) >= logits.shape[1]:
        raise InvalidArgument(f"logprob_token_ids: the vocabulary has the ids 0 to {logits.shape[1] - 1}")
    ids = np.array(chosen, np.int32)
    rows = len(logits)
    scores = np.empty((rows, len(ids)))
    if rows:
        highest = logits.max(axis=1, keepdims=True)
        scores = logits[:, ids] - highest - np.log(np.exp(logits - highest).sum(axis=1, keepdims=True))
    more: Arrays = {"output_top_ids": np.tile(ids, (rows, 1))[None], "output_top_log_probs": scores[None]}
    return {**{name: data for name, data in outputs.items() if name != LOGITS}, **more}


def _usage(outputs: Arrays) -> Usage | None:
    """The numbers of tokens; None if the ensemble does not count them."""
    if "num_prompt_tokens" not in outputs or "num_completion_tokens" not in outputs:
        return None
    cached = outputs["num_cached_tokens"].item(0) if "num_cached_tokens" in outputs else 0
    usage = Usage(outputs["num_prompt_tokens"].item(0), cached, outputs["num_completion_tokens"].item(0))
    if not all(name in outputs for name in DRAFTS):
        return usage
    drafted, accepted = (outputs[name].item(0) for name in DRAFTS)
    return replace(usage, drafted=drafted, accepted=accepted)


def _warning(outputs: Arrays, hides_limit: bool) -> str:
    """The ensemble's warning, without its note on a token limit that the client did not set."""
    if "warning" not in outputs:
        return ""
    text: str = outputs["warning"].item(0).decode("utf-8", "replace")
    if not hides_limit:
        return text
    return "; ".join(part for part in text.split("; ") if not part.startswith(f"max_tokens is {NO_LIMIT},"))


@dataclass(slots=True)
class Answer:
    """The pieces of one answer, joined."""

    texts: list[str] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)  # only pieces with arrays
    last: Piece = field(default_factory=lambda: Piece(""))  # has the finish reason and the usage

    def add(self, piece: Piece) -> None:
        self.texts.append(piece.text)
        if piece.arrays:
            self.pieces.append(piece)
        if piece.finish_reason:
            self.last = piece

    @property
    def text(self) -> str:
        return "".join(self.texts)


async def answers(pieces: AsyncGenerator[Piece, None], count: int) -> list[Answer]:
    found = [Answer() for _ in range(count)]
    async with aclosing(pieces):
        async for piece in pieces:
            found[piece.index].add(piece)
    return found


def total_usage(groups: Sequence[Sequence[Answer]]) -> Usage | None:
    """The usage of the answers to several prompts; None if the ensemble does not count tokens."""
    total = Usage()
    for group in groups:
        for place, answer in enumerate(group):
            usage = answer.last.usage
            if usage is None:
                return None
            total += usage if place == 0 else replace(usage, prompt=0, cached=0)
    return total
