"""`LlmEngine`: tensorrt_llm.LLM of release 1.3 and newer behind the `Engine` protocol. It batches inside itself.

A request's output is an asynchronous iterator on its consumer's own event loop; a task for each sequence passes its
output to the stream. A separate thread polls the iteration statistics, which block.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import AsyncGenerator, Collection, Sequence
from typing import Any

from llmserve.core import FinishReason, GenerateRequest, TokenEvent
from llmserve.engine.base import EngineInfo, EngineStats
from llmserve.engine.stream import EngineEnd, TokenStream
from llmserve.engine.tensorrt_llm import library
from llmserve.engine.tensorrt_llm.answers import SequenceAnswer, too_late
from llmserve.engine.tensorrt_llm.queue import check_room
from llmserve.engine.tensorrt_llm.sampling import (
    beam_arguments,
    bias_tensor,
    check_applied,
    check_scores,
    priority_of,
    sampling_arguments,
)
from llmserve.engine.tensorrt_llm.statistics import engine_stats, idle
from llmserve.engine.validation import check_request
from llmserve.errors import InternalError, InvalidArgument, LlmserveError, Unavailable

logger = logging.getLogger(__name__)

POLL_S = 0.25
NO_END_ID = -1
FINISH_REASONS = {
    "length": FinishReason.LENGTH,
    "timeout": FinishReason.TIMED_OUT,
    "cancelled": FinishReason.CANCELLED,
}


class LlmEngine:
    """Owns `llm` and shuts it down. Every stream ends, with its last event or with one error."""

    def __init__(
        self,
        llm: Any,
        names: library.Llm,
        info: EngineInfo,
        *,
        max_queue_size: int,
        tokens_per_block: int,
        applied: Collection[str],
    ) -> None:
        """`applied`: the parameters in sampling.OF_SOME_RELEASES that the installed sampler supports."""
        self._llm = llm
        self._applied = applied
        self._names = names
        self._info = info
        self._max_queue_size = max_queue_size
        self._takes_priorities = "priority" in inspect.signature(llm.generate_async).parameters  # newer releases
        self._lock = threading.Lock()
        self._open: dict[TokenStream, int] = {}  # sequences of each
        self._end = EngineEnd()
        self._ended = threading.Event()
        self._statistics = EngineStats(tokens_per_block=tokens_per_block)
        self._thread = threading.Thread(target=self._watch, name=f"llmserve-llm-{info.name}", daemon=True)
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
        check_applied(request, self._applied)
        check_scores(request)
        return self._stream(request)

    def stats(self) -> EngineStats:
        """As of the last poll."""
        with self._lock:
            return self._statistics if self._open else idle(self._statistics)

    def healthy(self) -> bool:
        return self._end.reason is None

    def close(self) -> None:
        """Shut the LLM down; open streams end with `Unavailable`. May be called again."""
        self._shut(Unavailable("the engine has been closed"))
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join()
            self._llm.shutdown()

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        if late := too_late(request):
            for event in late:
                yield event
            return
        stream = TokenStream(asyncio.get_running_loop(), request.num_answers)
        self._enter(stream, request.num_sequences)
        tasks = [asyncio.create_task(self._pump(request, index, stream)) for index in range(request.num_sequences)]
        try:
            while stream.num_open:
                yield await stream.get()
        finally:
            with self._lock:
                self._open.pop(stream, None)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _enter(self, stream: TokenStream, num_sequences: int) -> None:
        with self._lock:
            self._end.check()
            check_room(num_sequences, sum(self._open.values()), self._info, self._max_queue_size)
            self._open[stream] = num_sequences

    async def _pump(self, request: GenerateRequest, index: int, stream: TokenStream) -> None:
        """One sequence (or all beams) from the library to the stream. Cancelled when the consumer has gone."""
        answers = [SequenceAnswer(request, index + beam) for beam in range(request.beam.width if request.beam else 1)]
        output = None
        try:
            async with asyncio.timeout(None if request.deadline is None else request.deadline - time.monotonic()):
                output = self._start(request, index)
                await self._move(output, answers, stream)
        except TimeoutError:
            for answer in answers:
                if not answer.is_over and (event := answer.add((), (), FinishReason.TIMED_OUT)):
                    stream.put(event)
        except self._names.request_error as error:
            stream.put(InternalError(f"the engine refused the request: {error}"))
        except LlmserveError as error:
            stream.put(error)
        except Exception as error:  # the border: not this request's fault, so every stream gets the error
            logger.exception("engine %s failed", self._info.name)
            self._shut(InternalError(f"tensorrt_llm.LLM failed: {error}"))
        finally:
            if output is not None and not output.finished:
                output.abort()

    def _start(self, request: GenerateRequest, index: int) -> Any:
        """Hand one sequence over. If the library rejects its values, the request is invalid."""
        try:
            return self._llm.generate_async(
                list(request.prompt_ids),
                sampling_params=self._parameters(request, index),
                streaming=request.beam is None,
                **({"priority": priority_of(request)} if self._takes_priorities else {}),
            )
        except (ValueError, TypeError) as error:
            raise InvalidArgument(f"request {request.request_id!r}: tensorrt_llm.LLM refuses it: {error}") from error

    async def _move(self, output: Any, answers: Sequence[SequenceAnswer], stream: TokenStream) -> None:
        if len(answers) > 1:
            await output.aresult()
            for answer, completion in zip(answers, output.outputs, strict=True):
                self._put(answer, completion, completion.token_ids, completion.logprobs, stream)
            return
        async for latest in output:
            completion = latest.outputs[0]
            self._put(answers[0], completion, completion.token_ids_diff, completion.logprobs_diff, stream)
            if answers[0].is_over:  # possibly by a stop word that the library does not know
                return
        if not answers[0].is_over:
            raise InternalError("the answer ended without a reason")

    def _put(
        self, answer: SequenceAnswer, completion: Any, tokens: Sequence[int], log_probs: Any, stream: TokenStream
    ) -> None:
        event = answer.add(list(tokens), _floats(tokens, log_probs), _reason(completion))
        if event is not None:
            stream.put(event)

    def _parameters(self, request: GenerateRequest, index: int) -> Any:
        """Stop words are matched here, because the library only knows single stop ids; bad words use a processor."""
        end_id = NO_END_ID if request.end_id is None else request.end_id
        arguments = sampling_arguments(request.sampling, index=index) | beam_arguments(request)
        if request.beam is not None:
            arguments |= {"use_beam_search": True, "n": request.beam.width, "best_of": request.beam.width}
        if request.bad_ids:
            arguments["logits_processor"] = library.BannedSequences(request.bad_ids)
        if request.embedding_bias:
            arguments["embedding_bias"] = bias_tensor(request, self._info.vocab_size)
        if request.return_log_probs:
            arguments["logprobs"] = 1
        return self._names.sampling_params(
            max_tokens=request.max_new_tokens(self._info.max_seq_len),
            end_id=end_id,
            pad_id=end_id,
            ignore_eos=request.end_id is None,
            detokenize=False,
            add_special_tokens=False,
            **arguments,
        )

    def _shut(self, error: LlmserveError) -> None:
        """End every open stream with `error`, and accept no more requests."""
        with self._lock:
            outbox = self._end.say(error, self._open)
            self._open.clear()
        outbox.flush()

    def _watch(self) -> None:
        """The statistics thread also notices if the library dies without any requests."""
        while not self._ended.wait(POLL_S):
            try:
                latest = self._llm.get_stats(timeout=POLL_S)
            except Exception as error:  # the border
                logger.exception("engine %s failed", self._info.name)
                self._shut(InternalError(f"tensorrt_llm.LLM failed: {error}"))
                return
            if latest:
                with self._lock:
                    self._statistics = engine_stats(latest[-1])


def _reason(completion: Any) -> FinishReason | None:
    """ "stop" means the end token, or a stop word if it names one."""
    name = completion.finish_reason
    if name == "stop":
        return FinishReason.END_ID if completion.stop_reason is None else FinishReason.STOP_WORDS
    return FINISH_REASONS[name] if name else None


def _floats(tokens: Sequence[int], log_probs: Any) -> list[float]:
    """Values of the tokens: each entry is a number, or maps token ids to objects with one."""
    return [
        float(entry[token].logprob) if isinstance(entry, dict) else float(entry)
        for token, entry in zip(tokens, log_probs or (), strict=False)
    ]
