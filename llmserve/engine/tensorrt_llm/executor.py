"""`ExecutorEngine`: the C++ executor of TensorRT-LLM 1.2 behind the `Engine` protocol. It batches inside itself.

Threads. Consumers run on event loops and enqueue from there. One reader thread waits for responses to all requests and
passes them to their loops. `_lock` guards the table of waiting requests; it is held over `enqueue_request`, which does
not block, so that no response arrives before its request is known.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any

from llmserve.core import FinishReason, GenerateRequest, TokenEvent
from llmserve.engine.base import EngineInfo, EngineStats
from llmserve.engine.stream import EngineEnd, Outbox, TokenStream
from llmserve.engine.tensorrt_llm.answers import Measured, SequenceAnswer, too_late
from llmserve.engine.tensorrt_llm.queue import check_room
from llmserve.engine.tensorrt_llm.sampling import (
    beam_arguments,
    bias_tensor,
    check_scores,
    check_top_k,
    priority_of,
    sampling_arguments,
)
from llmserve.engine.tensorrt_llm.statistics import engine_stats, idle
from llmserve.engine.validation import check_request
from llmserve.errors import InternalError, LlmserveError, PromptTooLong, Unavailable

logger = logging.getLogger(__name__)

POLL = timedelta(milliseconds=100)  # how soon the reader notices that the engine was closed
CLOSE_TIMEOUT_S = 30.0


@dataclass(eq=False, slots=True)
class _Waiting:
    """The consumer of one of the executor's requests."""

    stream: TokenStream
    answers: list[SequenceAnswer]  # of its beams
    num_seen: int = 0  # log-probs, all of which are in each response


@dataclass(frozen=True, slots=True)
class ExecutorLimits:
    """For this process."""

    max_input_len: int
    max_queue_size: int  # 0: no limit
    tokens_per_block: int


class ExecutorEngine:
    """Owns `executor` and shuts it down. Every stream ends, with its last event or with one error."""

    def __init__(self, executor: Any, names: ModuleType, info: EngineInfo, limits: ExecutorLimits) -> None:
        self._executor = executor
        self._names = names
        self._info = info
        self._limits = limits
        self._lock = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}  # by the executor's request id
        self._end = EngineEnd()
        self._statistics = EngineStats(tokens_per_block=limits.tokens_per_block)
        self._reasons = {
            names.FinishReason.END_ID: FinishReason.END_ID,
            names.FinishReason.STOP_WORDS: FinishReason.STOP_WORDS,
            names.FinishReason.LENGTH: FinishReason.LENGTH,
            names.FinishReason.TIMED_OUT: FinishReason.TIMED_OUT,
            names.FinishReason.CANCELLED: FinishReason.CANCELLED,
        }
        self._thread = threading.Thread(target=self._read, name=f"llmserve-executor-{info.name}", daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        return self._info

    def submit(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """See `Engine.submit`."""
        self._end.check()
        info = self._info
        check_request(
            request, vocab_size=info.vocab_size, max_seq_len=info.max_seq_len, max_beam_width=info.max_beam_width
        )
        check_top_k(request.sampling)
        check_scores(request)
        num_tokens, limit = len(request.prompt_ids), self._limits.max_input_len
        if num_tokens > limit:
            raise PromptTooLong(
                f"request {request.request_id!r}: the prompt has {num_tokens} tokens, but this engine takes at most "
                f"{limit} (max_input_len; max_num_tokens without chunked context)",
                num_tokens=num_tokens,
                limit=limit,
            )
        return self._stream(request)

    def stats(self) -> EngineStats:
        """As of the last step."""
        with self._lock:
            is_idle = not self._waiting
            if self._end.reason is None and (latest := self._latest_statistics()):
                self._statistics = engine_stats(json.loads(latest))
        return idle(self._statistics) if is_idle else self._statistics

    def _latest_statistics(self) -> str:
        """Empty if no step ran since the last call, or if the executor has failed, which the reader reports."""
        try:
            latest = self._executor.get_latest_iteration_stats()
        except RuntimeError:
            return ""
        return latest[-1].to_json_str() if latest else ""

    def healthy(self) -> bool:
        if self._end.reason is None and not self._executor.can_enqueue_requests():
            self._shut(InternalError("the executor accepts no more requests; see its log, and restart the server"))
        return self._end.reason is None

    def close(self) -> None:
        """Shut the executor down; open streams end with `Unavailable`. May be called again."""
        self._shut(Unavailable("the engine has been closed"))
        self._thread.join(CLOSE_TIMEOUT_S)

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        if late := too_late(request):
            for event in late:
                yield event
            return
        stream = TokenStream(asyncio.get_running_loop(), request.num_answers)
        ids = self._enqueue(request, stream)
        try:
            while stream.num_open:
                yield await stream.get()
        finally:
            self._leave(ids)

    def _enqueue(self, request: GenerateRequest, stream: TokenStream) -> list[int]:
        """One request to the executor per sequence; beams share one. All are enqueued, or none with an error."""
        ids: list[int] = []
        try:
            wanted = [self._request(request, index) for index in range(request.num_sequences)]
            with self._lock:
                self._end.check()
                check_room(len(wanted), len(self._waiting), self._info, self._limits.max_queue_size)
                for index, one in enumerate(wanted):
                    answers = [SequenceAnswer(request, index + beam) for beam in range(self._width(request))]
                    ids.append(self._executor.enqueue_request(one))
                    self._waiting[ids[-1]] = _Waiting(stream, answers)
        except (RuntimeError, TypeError) as error:  # the library's error
            self._leave(ids)
            raise InternalError(f"the executor did not accept the request: {error}") from error
        return ids

    def _width(self, request: GenerateRequest) -> int:
        return request.beam.width if request.beam else 1

    def _request(self, request: GenerateRequest, index: int) -> Any:
        names = self._names
        left = None if request.deadline is None else max(0.001, request.deadline - time.monotonic())
        width = self._width(request)
        return names.Request(
            input_token_ids=list(request.prompt_ids),
            max_tokens=request.max_new_tokens(self._info.max_seq_len),
            streaming=width == 1,
            sampling_config=names.SamplingConfig(
                beam_width=width, **sampling_arguments(request.sampling, index=index), **beam_arguments(request)
            ),
            output_config=names.OutputConfig(
                return_log_probs=request.return_log_probs, exclude_input_from_output=True, return_perf_metrics=True
            ),
            end_id=request.end_id,
            pad_id=request.end_id,
            bad_words=[list(word) for word in request.bad_ids] or None,
            stop_words=[list(word) for word in request.stop_ids] or None,
            embedding_bias=bias_tensor(request, self._info.vocab_size),
            priority=priority_of(request),
            allotted_time_ms=None if left is None else timedelta(seconds=left),
        )

    def _leave(self, ids: list[int]) -> None:
        """The consumer has gone: cancel its running requests."""
        with self._lock:
            running = [request_id for request_id in ids if self._waiting.pop(request_id, None)]
            if self._end.reason is None:
                for request_id in running:
                    self._executor.cancel_request(request_id)

    def _shut(self, error: LlmserveError) -> None:
        """End every open stream with `error`, and accept no more requests."""
        with self._lock:
            outbox = self._end.say(error, (waiting.stream for waiting in self._waiting.values()))
            self._waiting.clear()
        outbox.flush()

    def _read(self) -> None:
        """The reader thread."""
        try:
            while self._end.reason is None:
                self._deliver(self._executor.await_responses(timeout=POLL))
        except Exception as error:  # the border: whatever failed, every open stream gets the error
            logger.exception("the executor of engine %s failed", self._info.name)
            self._shut(InternalError(f"the executor failed: {error}"))
        finally:
            self._shut_down()

    def _shut_down(self) -> None:
        try:
            self._executor.shutdown()
        except RuntimeError:  # of an executor that has failed
            logger.exception("the executor of engine %s could not be shut down", self._info.name)

    def _deliver(self, responses: list[Any]) -> None:
        outbox = Outbox()
        with self._lock:
            for response in responses:
                waiting = self._waiting.get(response.request_id)
                if waiting is not None:  # otherwise its consumer left
                    self._take(response, waiting, outbox)
        if closed := outbox.flush():
            self._leave([each for each, waiting in self._waiting.items() if waiting.stream.loop in closed])

    def _take(self, response: Any, waiting: _Waiting, outbox: Outbox) -> None:
        """Call with the lock held."""
        if response.has_error():
            del self._waiting[response.request_id]
            outbox.put(waiting.stream, InternalError(f"the executor refused the request: {response.error_msg}"))
            return
        result = response.result
        for beam, answer in enumerate(waiting.answers):
            event = self._add(answer, beam, result, waiting)
            if event is not None:
                outbox.put(waiting.stream, event)
        if all(answer.is_over for answer in waiting.answers):
            del self._waiting[response.request_id]
            if not result.is_final:  # a stop word that the executor did not find
                self._executor.cancel_request(response.request_id)

    def _add(self, answer: SequenceAnswer, beam: int, result: Any, waiting: _Waiting) -> TokenEvent | None:
        tokens = list(result.output_token_ids[beam]) if beam < len(result.output_token_ids) else []
        reason = self._reasons.get(result.finish_reasons[beam]) if result.is_final and result.finish_reasons else None
        if result.is_final and reason is None:
            reason = FinishReason.CANCELLED
        log_probs: list[float] = []
        if result.log_probs and tokens:  # all of them so far, or only the new ones
            every = list(result.log_probs[beam])
            waiting.num_seen += len(tokens)
            log_probs = every[: max(waiting.num_seen, len(tokens))][-len(tokens) :]
        return answer.add(tokens, log_probs, reason, self._measured(result))

    def _measured(self, result: Any) -> Measured:
        metrics = result.request_perf_metrics
        if metrics is None:
            return Measured()
        times, cache = metrics.timing_metrics, metrics.kv_cache_metrics
        queued = (times.first_scheduled_time - times.arrival_time) / timedelta(microseconds=1)
        return Measured(
            cached_tokens=cache.num_reused_blocks * self._statistics.tokens_per_block,
            queue_ns=max(0, int(queued)) * 1000,
        )
