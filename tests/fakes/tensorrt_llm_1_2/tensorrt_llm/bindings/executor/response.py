"""What an executor answers."""

import datetime
import json
from dataclasses import dataclass

from llmserve.core import TokenEvent, Usage
from tensorrt_llm.bindings.executor.enums import FinishReason
from tensorrt_llm.bindings.executor.request import Request


@dataclass
class KvCacheMetrics:
    num_reused_blocks: int


@dataclass
class TimingMetrics:
    """Points of a steady clock."""

    arrival_time: datetime.timedelta
    first_scheduled_time: datetime.timedelta
    first_token_time: datetime.timedelta
    last_token_time: datetime.timedelta

    @classmethod
    def of(cls, usage: Usage) -> "TimingMetrics":
        times = (usage.arrival_ns, usage.first_scheduled_ns, usage.first_token_ns, usage.last_token_ns)
        return cls(*(datetime.timedelta(microseconds=time_ns // 1000) for time_ns in times))


@dataclass
class RequestPerfMetrics:
    timing_metrics: TimingMetrics
    kv_cache_metrics: KvCacheMetrics


class Result:
    is_final = False
    is_sequence_final = False
    output_token_ids: list[list[int]] = []  # noqa: RUF012
    cum_log_probs: list[float] | None = None
    log_probs: list[list[float]] | None = None
    finish_reasons: list[FinishReason] = []  # noqa: RUF012
    sequence_index = 0
    decoding_iter = 0
    request_perf_metrics: RequestPerfMetrics | None = None


class Response:
    request_id = 0
    client_id: int | None = None

    def __init__(self, request_id: int, result: Result | None = None, error: str = "") -> None:
        self.request_id = request_id
        self._result = result
        self._error = error

    def has_error(self) -> bool:
        return self._result is None

    @property
    def error_msg(self) -> str:
        if self._result is not None:
            raise RuntimeError("[TensorRT-LLM][ERROR] Assertion failed: there is no error")
        return self._error

    @property
    def result(self) -> Result:
        if self._result is None:
            raise RuntimeError(self._error)
        return self._result


class IterationStats:
    def __init__(self, text: str) -> None:
        self._text = text
        self.iter = json.loads(text)["iter"]

    def to_json_str(self) -> str:
        return self._text


class Answer:
    """One request while it runs: our engine's events become responses. Stop words stay in the tokens, as there."""

    def __init__(self, request: Request, tokens_per_block: int) -> None:
        self.request = request
        self._tokens_per_block = tokens_per_block
        self._tokens: list[list[int]] = [[] for _ in range(request.sampling_config.beam_width)]
        self._log_probs: list[list[float]] = [[] for _ in self._tokens]
        self._ended: dict[int, FinishReason] = {}
        self.is_over = False

    def add(self, event: TokenEvent) -> Result | None:
        beam = event.sequence_index
        new = []
        for token, log_prob in zip(event.token_ids, event.log_probs, strict=True):
            self._tokens[beam].append(token)
            self._log_probs[beam].append(log_prob)
            new.append(token)
            if any(self._tokens[beam][-len(word) :] == word for word in self.request.stop_words):
                return self._result(beam, new, FinishReason.STOP_WORDS, event.usage)
        reason = FinishReason[event.finish_reason.name] if event.finish_reason else FinishReason.NOT_FINISHED
        return self._result(beam, new, reason, event.usage)

    def _result(self, beam: int, new: list[int], reason: FinishReason, usage: Usage | None) -> Result | None:
        if reason is not FinishReason.NOT_FINISHED:
            self._ended[beam] = reason
        self.is_over = len(self._ended) == len(self._tokens)
        if not self.request.streaming and not self.is_over:
            return None
        result = Result()
        result.is_final = result.is_sequence_final = self.is_over
        best_first = sorted(range(len(self._tokens)), key=lambda index: -sum(self._log_probs[index]))
        result.output_token_ids = (
            [new] if self.request.streaming else [list(self._tokens[index]) for index in best_first]
        )
        if not self.request.streaming and not self.request.output_config.exclude_input_from_output:
            result.output_token_ids = [self.request.input_token_ids + beam for beam in result.output_token_ids]
        result.finish_reasons = [self._ended.get(index, FinishReason.NOT_FINISHED) for index in best_first]
        if self.request.output_config.return_log_probs:
            result.log_probs = [list(self._log_probs[index]) for index in best_first]
            result.cum_log_probs = [sum(self._log_probs[index]) for index in best_first]
        if self.request.output_config.return_perf_metrics and self.is_over and usage is not None:
            reused = KvCacheMetrics(usage.cached_tokens // self._tokens_per_block)
            result.request_perf_metrics = RequestPerfMetrics(TimingMetrics.of(usage), reused)
        return result

    def cancelled(self) -> Result:
        self._ended = dict.fromkeys(range(len(self._tokens)), FinishReason.CANCELLED)
        result = self._result(0, [], FinishReason.CANCELLED, None)
        assert result is not None
        return result
