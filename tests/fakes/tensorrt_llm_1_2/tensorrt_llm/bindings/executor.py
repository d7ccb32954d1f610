"""tensorrt_llm.bindings.executor of release 1.2. Types are checked as the compiled bindings check them."""

import datetime
import enum
import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmserve.core import GenerateRequest, SamplingParams, TokenEvent, Usage
from llmserve.engine.open import EngineSettings
from llmserve.scheduler.settings import Policy, SchedulerSettings
from tests.fakes.cpu_network import joined_checkpoint, open_network
from tests.fakes.host import EngineHost

MAX_TOP_K = 1024


class ModelType(enum.Enum):
    DECODER_ONLY = 0
    ENCODER_ONLY = 1
    ENCODER_DECODER = 2


class CapacitySchedulerPolicy(enum.Enum):
    MAX_UTILIZATION = 0
    GUARANTEED_NO_EVICT = 1
    STATIC_BATCH = 2


class ContextChunkingPolicy(enum.Enum):
    FIRST_COME_FIRST_SERVED = 0
    EQUAL_PROGRESS = 1


class CommunicationType(enum.Enum):
    MPI = 0


class CommunicationMode(enum.Enum):
    LEADER = 0
    ORCHESTRATOR = 1


class BatchingType(enum.Enum):
    STATIC = 0
    INFLIGHT = 1


class RequestType(enum.Enum):
    REQUEST_TYPE_CONTEXT_AND_GENERATION = 0


class FinishReason(enum.Enum):
    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5


def check(name: str, value: Any, kind: Any, *, optional: bool = False) -> None:
    """As the bindings refuse: numpy numbers are no ints, an int is no list."""
    if optional and value is None:
        return
    accepted = (int, float) if kind is float else (kind,)
    if type(value) not in accepted and not (kind in (torch.Tensor, Path) and isinstance(value, kind)):
        raise TypeError(f"__init__(): incompatible function arguments: {name}={value!r} is not {kind.__name__}")


def check_list(name: str, value: Any, kind: Any) -> None:
    check(name, value, list)
    for item in value:
        check(name, item, kind)


class SchedulerConfig:
    def __init__(self, capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
                 context_chunking_policy: Any = None, dynamic_batch_config: Any = None) -> None:  # fmt: skip
        check("capacity_scheduler_policy", capacity_scheduler_policy, CapacitySchedulerPolicy)
        self.capacity_scheduler_policy = capacity_scheduler_policy


class KvCacheConfig:
    def __init__(self, enable_block_reuse: bool = True, max_tokens: int | None = None,
                 max_attention_window: list[int] | None = None, sink_token_length: int | None = None,
                 free_gpu_memory_fraction: float | None = None, host_cache_size: int | None = None,
                 onboard_blocks: bool = True, cross_kv_cache_fraction: float | None = None,
                 secondary_offload_min_priority: int | None = None, event_buffer_max_size: int = 0, *,
                 enable_partial_reuse: bool = True, copy_on_partial_reuse: bool = True, use_uvm: bool = False,
                 attention_dp_events_gather_period_ms: int = 5, runtime_defaults: Any = None,
                 max_gpu_total_bytes: int = 0) -> None:  # fmt: skip
        check("enable_block_reuse", enable_block_reuse, bool)
        check("max_tokens", max_tokens, int, optional=True)
        check("onboard_blocks", onboard_blocks, bool)
        check("host_cache_size", host_cache_size, int, optional=True)
        check("sink_token_length", sink_token_length, int, optional=True)
        check("free_gpu_memory_fraction", free_gpu_memory_fraction, float, optional=True)
        if max_attention_window is not None:
            check_list("max_attention_window", max_attention_window, int)
        self.enable_block_reuse = enable_block_reuse
        self.max_tokens = max_tokens
        self.max_attention_window = max_attention_window
        self.sink_token_length = sink_token_length
        self.free_gpu_memory_fraction = free_gpu_memory_fraction
        self.host_cache_size = host_cache_size
        self.onboard_blocks = onboard_blocks


class ExtendedRuntimePerfKnobConfig:
    def __init__(self, multi_block_mode: bool = True, enable_context_fmha_fp32_acc: bool = False,
                 cuda_graph_mode: bool = False, cuda_graph_cache_size: int = 0) -> None:  # fmt: skip
        check("multi_block_mode", multi_block_mode, bool)
        check("enable_context_fmha_fp32_acc", enable_context_fmha_fp32_acc, bool)
        check("cuda_graph_mode", cuda_graph_mode, bool)
        check("cuda_graph_cache_size", cuda_graph_cache_size, int)
        self.multi_block_mode = multi_block_mode
        self.cuda_graph_mode = cuda_graph_mode


class OrchestratorConfig:
    def __init__(self, is_orchestrator: bool = True, worker_executable_path: str = "", orch_leader_comm: Any = None,
                 spawn_processes: bool = True) -> None:  # fmt: skip
        check("is_orchestrator", is_orchestrator, bool)
        check("worker_executable_path", worker_executable_path, str)
        self.worker_executable_path = worker_executable_path


class ParallelConfig:
    def __init__(self, communication_type: CommunicationType = CommunicationType.MPI,
                 communication_mode: CommunicationMode = CommunicationMode.LEADER, device_ids: list[int] | None = None,
                 participant_ids: list[int] | None = None, orchestrator_config: OrchestratorConfig | None = None,
                 num_nodes: int | None = None) -> None:  # fmt: skip
        check("communication_mode", communication_mode, CommunicationMode)
        if device_ids is not None:
            check_list("device_ids", device_ids, int)
        self.communication_mode = communication_mode
        self.device_ids = device_ids
        self.orchestrator_config = orchestrator_config


class ExecutorConfig:
    def __init__(self, max_beam_width: int = 1, scheduler_config: SchedulerConfig | None = None,
                 kv_cache_config: KvCacheConfig | None = None, enable_chunked_context: bool = False,
                 normalize_log_probs: bool = True, iter_stats_max_iterations: int = 1000,
                 request_stats_max_iterations: int = 0, batching_type: BatchingType = BatchingType.INFLIGHT,
                 max_batch_size: int | None = None, max_num_tokens: int | None = None,
                 parallel_config: ParallelConfig | None = None, peft_cache_config: Any = None,
                 logits_post_processor_config: Any = None, decoding_config: Any = None,
                 use_gpu_direct_storage: bool = False, gpu_weights_percent: float = 1.0,
                 max_queue_size: int | None = None,
                 extended_runtime_perf_knob_config: ExtendedRuntimePerfKnobConfig | None = None,
                 debug_config: Any = None, recv_poll_period_ms: int = 0, max_seq_idle_microseconds: int = 180000000,
                 spec_dec_config: Any = None, guided_decoding_config: Any = None, additional_model_outputs: Any = None,
                 cache_transceiver_config: Any = None, gather_generation_logits: bool = False,
                 mm_embedding_offloading: bool = False, enable_trt_overlap: bool = False,
                 fail_fast_on_attention_window_too_large: bool = False) -> None:  # fmt: skip
        check("max_beam_width", max_beam_width, int)
        check("enable_chunked_context", enable_chunked_context, bool)
        check("normalize_log_probs", normalize_log_probs, bool)
        check("iter_stats_max_iterations", iter_stats_max_iterations, int)
        check("gpu_weights_percent", gpu_weights_percent, float)
        self.max_beam_width = max_beam_width
        self.scheduler_config = scheduler_config or SchedulerConfig()
        self.kv_cache_config = kv_cache_config or KvCacheConfig()
        self.enable_chunked_context = enable_chunked_context
        self.normalize_log_probs = normalize_log_probs
        self.iter_stats_max_iterations = iter_stats_max_iterations
        self.max_batch_size = max_batch_size
        self.max_num_tokens = max_num_tokens
        self.parallel_config = parallel_config
        self.gpu_weights_percent = gpu_weights_percent
        self.extended_runtime_perf_knob_config = extended_runtime_perf_knob_config


class SamplingConfig:
    def __init__(self, beam_width: int = 1, *, top_k: int | None = None, top_p: float | None = None,
                 top_p_min: float | None = None, top_p_reset_ids: int | None = None, top_p_decay: float | None = None,
                 seed: int | None = None, temperature: float | None = None, min_tokens: int | None = None,
                 beam_search_diversity_rate: float | None = None, repetition_penalty: float | None = None,
                 presence_penalty: float | None = None, frequency_penalty: float | None = None,
                 length_penalty: float | None = None, early_stopping: int | None = None,
                 no_repeat_ngram_size: int | None = None, num_return_sequences: int | None = None,
                 min_p: float | None = None, beam_width_array: list[int] | None = None) -> None:  # fmt: skip
        for name, value in {"beam_width": beam_width, "top_k": top_k, "seed": seed, "min_tokens": min_tokens,
                            "early_stopping": early_stopping}.items():  # fmt: skip
            check(name, value, int, optional=name != "beam_width")
        floats = {"top_p": top_p, "temperature": temperature, "repetition_penalty": repetition_penalty,
                  "presence_penalty": presence_penalty, "frequency_penalty": frequency_penalty, "min_p": min_p,
                  "length_penalty": length_penalty, "diversity": beam_search_diversity_rate}  # fmt: skip
        for name, number in floats.items():
            check(name, number, float, optional=True)
        if beam_width < 1 or (top_k is not None and not 0 <= top_k <= MAX_TOP_K):
            raise RuntimeError("[TensorRT-LLM][ERROR] Assertion failed: beam_width or top_k is out of range")
        if (temperature is not None and temperature <= 0) or (top_p is not None and not 0 < top_p <= 1):
            raise RuntimeError("[TensorRT-LLM][ERROR] Assertion failed: temperature or top_p is out of range")
        if seed is not None and not 0 <= seed < 2**64:
            raise TypeError("seed does not fit")
        self.beam_width = beam_width
        self.top_k = top_k
        self.top_p = top_p
        self.min_p = min_p
        self.seed = seed
        self.temperature = temperature
        self.min_tokens = min_tokens
        self.repetition_penalty = repetition_penalty
        self.presence_penalty = presence_penalty
        self.frequency_penalty = frequency_penalty

    def as_ours(self, max_tokens: int) -> SamplingParams:
        """With neither top_k nor top_p: the most likely token."""
        greedy = not self.top_k and not self.top_p
        return SamplingParams(
            max_tokens=max_tokens, min_tokens=self.min_tokens or 0, temperature=self.temperature or 1.0,
            top_k=1 if greedy else self.top_k or 0, top_p=self.top_p or 1.0, min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0, presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0, seed=self.seed or 0,
        )  # fmt: skip


class OutputConfig:
    def __init__(self, return_log_probs: bool = False, return_context_logits: bool = False,
                 return_generation_logits: bool = False, exclude_input_from_output: bool = False,
                 return_encoder_output: bool = False, return_perf_metrics: bool = False,
                 additional_model_outputs: Any = None) -> None:  # fmt: skip
        self.return_log_probs = return_log_probs
        self.exclude_input_from_output = exclude_input_from_output
        self.return_perf_metrics = return_perf_metrics


class Request:
    def __init__(self, input_token_ids: list[int], max_tokens: int, *, streaming: bool = False,
                 sampling_config: SamplingConfig | None = None, output_config: OutputConfig | None = None,
                 end_id: int | None = None, pad_id: int | None = None, position_ids: list[int] | None = None,
                 bad_words: list[list[int]] | None = None, stop_words: list[list[int]] | None = None,
                 embedding_bias: torch.Tensor | None = None, external_draft_tokens_config: Any = None,
                 prompt_tuning_config: Any = None, multimodal_input: Any = None, multimodal_embedding: Any = None,
                 mrope_config: Any = None, lora_config: Any = None, lookahead_config: Any = None,
                 kv_cache_retention_config: Any = None, logits_post_processor_name: str | None = None,
                 logits_post_processor: Any = None, encoder_input_token_ids: Any = None, client_id: int | None = None,
                 return_all_generated_tokens: bool = False, priority: float = 0.5,
                 type: RequestType = RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION, context_phase_params: Any = None,
                 encoder_input_features: Any = None, encoder_output_length: int | None = None,
                 cross_attention_mask: Any = None, num_return_sequences: int = 1, eagle_config: Any = None,
                 skip_cross_attn_blocks: Any = None, guided_decoding_params: Any = None,
                 language_adapter_uid: int | None = None,
                 allotted_time_ms: datetime.timedelta | None = None) -> None:  # fmt: skip
        check_list("input_token_ids", input_token_ids, int)
        check("max_tokens", max_tokens, int)
        check("streaming", streaming, bool)
        check("end_id", end_id, int, optional=True)
        check("pad_id", pad_id, int, optional=True)
        check("priority", priority, float)
        check("allotted_time_ms", allotted_time_ms, datetime.timedelta, optional=True)
        check("embedding_bias", embedding_bias, torch.Tensor, optional=True)
        for name, words in (("bad_words", bad_words), ("stop_words", stop_words)):
            for word in words or []:
                check_list(name, word, int)
                assert word, f"Invalid {name}: empty"
        if not input_token_ids or max_tokens < 1 or not 0 <= priority <= 1:
            raise RuntimeError("[TensorRT-LLM][ERROR] Assertion failed: invalid request")
        self.input_token_ids = input_token_ids
        self.max_tokens = max_tokens
        self.streaming = streaming
        self.sampling_config = sampling_config or SamplingConfig()
        self.output_config = output_config or OutputConfig()
        self.end_id = end_id
        self.bad_words = bad_words or []
        self.stop_words = stop_words or []
        self.embedding_bias = embedding_bias
        self.priority = priority
        self.allotted_time_ms = allotted_time_ms


class KvCacheMetrics:
    def __init__(self, num_reused_blocks: int) -> None:
        self.num_reused_blocks = num_reused_blocks


class TimingMetrics:
    """Points of a steady clock."""

    def __init__(self, usage: Usage) -> None:
        self.arrival_time = datetime.timedelta(microseconds=usage.arrival_ns // 1000)
        self.first_scheduled_time = datetime.timedelta(microseconds=usage.first_scheduled_ns // 1000)
        self.first_token_time = datetime.timedelta(microseconds=usage.first_token_ns // 1000)
        self.last_token_time = datetime.timedelta(microseconds=usage.last_token_ns // 1000)


class RequestPerfMetrics:
    def __init__(self, usage: Usage, tokens_per_block: int) -> None:
        self.timing_metrics = TimingMetrics(usage)
        self.kv_cache_metrics = KvCacheMetrics(usage.cached_tokens // tokens_per_block)


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
            result.request_perf_metrics = RequestPerfMetrics(usage, self._tokens_per_block)
        return result

    def cancelled(self) -> Result:
        self._ended = dict.fromkeys(range(len(self._tokens)), FinishReason.CANCELLED)
        result = self._result(0, [], FinishReason.CANCELLED, None)
        assert result is not None
        return result


class Executor:
    """Any thread may call; `await_responses` blocks. `crash` is for tests."""

    def __init__(self, model_path: Path, model_type: ModelType, executor_config: ExecutorConfig) -> None:
        check("model_path", Path(model_path), Path)
        check("model_type", model_type, ModelType)
        check("executor_config", executor_config, ExecutorConfig)
        content = json.loads((Path(model_path) / "config.json").read_text())
        limits, model = content["build_config"], content["pretrained_config"]
        _check_ranks(model["mapping"]["world_size"], executor_config)
        if executor_config.max_beam_width > limits["max_beam_width"]:
            raise RuntimeError("[TensorRT-LLM][ERROR] Assertion failed: maxBeamWidth exceeds the engine's")
        kv = executor_config.kv_cache_config
        self.config = executor_config
        self._limits = limits
        self._vocab_size = model["vocab_size"]
        policy = executor_config.scheduler_config.capacity_scheduler_policy
        settings = EngineSettings(
            threads=1, max_kv_tokens=kv.max_tokens or 0, kv_cache_fraction=kv.free_gpu_memory_fraction or 0.9,
            scheduler=SchedulerSettings(Policy[policy.name], kv.enable_block_reuse, max_queue_size=0),
        )  # fmt: skip
        window = kv.max_attention_window[0] if kv.max_attention_window else None
        self._tokens_per_block = limits["plugin_config"]["tokens_per_block"]
        sizes = {name: limits[name] for name in ("max_batch_size", "max_num_tokens", "max_seq_len")}
        self._host = EngineHost(
            open_network(joined_checkpoint(Path(model_path), window=window),
                         sizes | {"tokens_per_block": self._tokens_per_block}, settings)
        )  # fmt: skip
        self._ids = itertools.count(1)
        self._ready = threading.Condition()
        self._responses: list[Response] = []
        self._running: dict[int, tuple[Answer, Any]] = {}
        self._is_shut = False
        self._crash = ""
        self._last_iteration = -1

    def enqueue_request(self, request: Request) -> int:
        check("request", request, Request)
        self._check_open()
        if request.sampling_config.beam_width > self.config.max_beam_width:
            raise RuntimeError(
                "[TensorRT-LLM][ERROR] Assertion failed: Requested beam width is larger than the max beam width"
            )
        room = self._limits["max_seq_len"] - len(request.input_token_ids)
        if not self.config.enable_chunked_context and len(request.input_token_ids) > self._limits["max_num_tokens"]:
            room = 0
        request_id = next(self._ids)
        if room < 1:
            self._push(
                Response(
                    request_id, error=f"Prompt length ({len(request.input_token_ids)}) exceeds maximum input length."
                )
            )
            return request_id
        answer = Answer(request, self._tokens_per_block)
        with self._ready:
            self._running[request_id] = (answer, None)
        future = self._host.start(
            self._as_ours(request, request_id, room), lambda event: self._on_event(request_id, event)
        )
        with self._ready:
            if request_id in self._running:
                self._running[request_id] = (answer, future)
        return request_id

    def enqueue_requests(self, requests: list[Request]) -> list[int]:
        return [self.enqueue_request(request) for request in requests]

    def await_responses(self, *arguments: Any, **named: Any) -> Any:
        """(timeout=None) -> list; (id, timeout=None) -> list; (ids, timeout=None) -> list of lists."""
        if named.keys() - {"id", "ids", "timeout"}:
            raise TypeError(f"await_responses(): incompatible function arguments: {sorted(named)}")
        values = list(arguments)
        ids = named.get("id", named.get("ids"))
        if values and ids is None and not isinstance(values[0], datetime.timedelta | None):
            ids = values.pop(0)
        timeout = named.get("timeout", values[0] if values else None)
        check("timeout", timeout, datetime.timedelta, optional=True)
        if isinstance(ids, list):
            return [self._await({request_id}, timeout) for request_id in ids]
        return self._await(None if ids is None else {ids}, timeout)

    def _await(self, ids: set[int] | None, timeout: datetime.timedelta | None) -> list[Response]:
        def wanted() -> list[Response]:
            return [response for response in self._responses if ids is None or response.request_id in ids]

        with self._ready:
            seconds = None if timeout is None else timeout.total_seconds()
            self._ready.wait_for(lambda: wanted() or self._is_shut or self._crash, seconds)
            self._check_open()
            found = wanted()
            self._responses = [response for response in self._responses if response not in found]
            return found

    def get_num_responses_ready(self, id: int | None = None) -> int:
        with self._ready:
            return sum(id in (None, response.request_id) for response in self._responses)

    def cancel_request(self, id: int | None = None) -> None:
        check("id", id, int)
        with self._ready:
            answer, future = self._running.pop(id, (None, None))
        if answer is not None:
            if future is not None:
                future.cancel()
            self._push(Response(id, answer.cancelled()))

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        """Those since the last call."""
        stats = IterationStats(self._host.statistics_text())
        if stats.iter == self._last_iteration:
            return []
        self._last_iteration = stats.iter
        return [stats]

    def get_latest_request_stats(self) -> list[Any]:
        return []

    def can_enqueue_requests(self) -> bool:
        return not self._is_shut and not self._crash

    def shutdown(self) -> None:
        with self._ready:
            if self._is_shut:
                return
            self._is_shut = True
            self._ready.notify_all()
        self._host.close()

    def __enter__(self) -> "Executor":
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def crash(self) -> None:
        with self._ready:
            self._crash = (
                "[TensorRT-LLM][ERROR] CUDA runtime error in cudaEventSynchronize(get()): an illegal memory access"
            )
            self._ready.notify_all()

    def _check_open(self) -> None:
        if self._crash:
            raise RuntimeError(self._crash)
        if self._is_shut:
            raise RuntimeError(
                "[TensorRT-LLM][ERROR] Assertion failed: Cannot enqueue or await: the executor was shut down"
            )

    def _on_event(self, request_id: int, event: TokenEvent) -> bool:
        with self._ready:
            if request_id not in self._running:
                return False
            answer, _ = self._running[request_id]
            result = answer.add(event)
            if answer.is_over:
                del self._running[request_id]
        if result is not None:
            self._push(Response(request_id, result))
        return not answer.is_over

    def _push(self, response: Response) -> None:
        with self._ready:
            self._responses.append(response)
            self._ready.notify_all()

    def _as_ours(self, request: Request, request_id: int, room: int) -> GenerateRequest:
        bias: tuple[tuple[int, float], ...] = ()
        if request.embedding_bias is not None:
            assert request.embedding_bias.dtype == torch.float32, "embedding bias: type must be that of the logits"
            assert tuple(request.embedding_bias.shape) == (self._vocab_size,), "embedding bias: expected [vocab_size]"
            values = request.embedding_bias.numpy()
            bias = tuple((int(token), float(values[token])) for token in np.flatnonzero(values))
        beams = request.sampling_config.beam_width
        sampling = request.sampling_config if beams == 1 else SamplingConfig(top_p=1.0, seed=request_id)
        allotted = request.allotted_time_ms
        return GenerateRequest(
            f"fake-{request_id}", tuple(request.input_token_ids), sampling.as_ours(min(request.max_tokens, room)),
            end_id=request.end_id, bad_ids=tuple(tuple(word) for word in request.bad_words), embedding_bias=bias,
            num_sequences=beams, return_log_probs=True, priority=round(100 * (request.priority - 0.5)),
            deadline=None if allotted is None else time.monotonic() + allotted.total_seconds(),
        )  # fmt: skip


def _check_ranks(world_size: int, config: ExecutorConfig) -> None:
    """One process is no MPI world of several: then it must be the orchestrator, and spawn the others."""
    parallel = config.parallel_config
    if world_size == 1:
        return
    if parallel is None or parallel.communication_mode is not CommunicationMode.ORCHESTRATOR:
        raise RuntimeError(f"[TensorRT-LLM][ERROR] Assertion failed: MPI size (1) does not match TP*PP ({world_size})")
    orchestrator = parallel.orchestrator_config
    if orchestrator is None or not Path(orchestrator.worker_executable_path).is_file():
        raise RuntimeError("[TensorRT-LLM][ERROR] Assertion failed: worker_executable_path")
    if parallel.device_ids is not None and len(parallel.device_ids) != world_size:
        raise RuntimeError("[TensorRT-LLM][ERROR] Assertion failed: one device id for each rank")
