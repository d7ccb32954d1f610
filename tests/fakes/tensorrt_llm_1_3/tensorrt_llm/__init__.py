"""A fake of the part of tensorrt_llm 1.3 that we use: LLM and SamplingParams; see tests/fakes/README.md."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmserve.core import FinishReason, GenerateRequest, TokenEvent
from llmserve.core import SamplingParams as OurParams
from llmserve.engine.open import EngineSettings
from llmserve.scheduler.settings import Policy, SchedulerSettings
from tensorrt_llm.llmapi import KvCacheConfig, RequestError, SchedulerConfig
from tensorrt_llm.version import __version__
from tests.fakes.cpu_network import open_network
from tests.fakes.host import EngineHost

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

LLM_ARGUMENTS = {
    "pipeline_parallel_size", "kv_cache_config", "scheduler_config", "enable_chunked_prefill", "max_batch_size",
    "max_num_tokens", "max_seq_len", "max_beam_width", "iter_stats_max_iterations", "enable_iter_perf_stats",
    "guided_decoding_backend", "enable_lora", "gather_generation_logits", "num_postprocess_workers",
    "return_perf_metrics", "perf_metrics_max_requests",
}  # fmt: skip


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    bad: Any = None
    bad_token_ids: list[int] | None = None
    stop: Any = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: torch.Tensor | None = None
    logits_processor: Callable[..., None] | None = None
    apply_batched_logits_processor: bool = False
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    min_p: float | None = None
    beam_width_array: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: Any = None
    lookahead_config: Any = None
    guided_decoding: Any = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of ({self.best_of}) cannot be less than n ({self.n})")
        if self.max_tokens < 1 or (self.temperature is not None and self.temperature <= 0):
            raise ValueError("max_tokens or temperature is out of range")

    def as_ours(self, room: int) -> OurParams:
        greedy = not self.top_k and not self.top_p
        return OurParams(
            max_tokens=min(self.max_tokens, room), min_tokens=self.min_tokens or 0, temperature=self.temperature or 1.0,
            top_k=1 if greedy else self.top_k or 0, top_p=self.top_p or 1.0, min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0, presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0, seed=self.seed or 0,
        )  # fmt: skip


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class CompletionOutput:
    """The end token stays in `token_ids`, as the PyTorch sampler leaves it there."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_last_tokens: int = 0

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self.num_last_tokens :]

    @property
    def logprobs_diff(self) -> list[dict[int, Logprob]]:
        return self.logprobs[self.num_last_tokens :]


class RequestOutput:
    """A future and an asynchronous iterator, for the loop on which it was made."""

    def __init__(self, llm: "LLM", inputs: list[int], parameters: SamplingParams, streaming: bool) -> None:
        self.prompt_token_ids = inputs
        self.finished = False
        self.outputs = [CompletionOutput(index) for index in range(parameters.n)]
        self._parameters = parameters
        self._streaming = streaming
        self._loop = asyncio.get_running_loop()  # without one there is no asynchronous iteration
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._future = llm._host.start(llm._as_ours(inputs, parameters), self._on_event)
        llm._running.add(self)

    def abort(self) -> None:
        self._future.cancel()
        self._put("cancelled")

    def __aiter__(self) -> AsyncIterator["RequestOutput"]:
        return self

    async def __anext__(self) -> "RequestOutput":
        if self.finished:
            raise StopAsyncIteration
        for output in self.outputs:
            output.num_last_tokens = len(output.token_ids)
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        if item == "cancelled":
            self.outputs[0].finish_reason = "cancelled"
        else:
            self._take(item)
        self.finished = all(output.finish_reason for output in self.outputs)
        return self

    async def aresult(self) -> "RequestOutput":
        assert not self._streaming
        async for _ in self:
            pass
        if self._parameters.use_beam_search:
            self.outputs.sort(
                key=lambda output: (
                    -sum(entry[t].logprob for entry, t in zip(output.logprobs, output.token_ids, strict=True))
                )
            )
        return self

    def _on_event(self, event: TokenEvent) -> bool:
        self._put(event)
        return True

    def _put(self, item: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    def _take(self, event: TokenEvent) -> None:
        output = self.outputs[event.sequence_index]
        output.token_ids += event.token_ids
        output.logprobs += [{t: Logprob(value)} for t, value in zip(event.token_ids, event.log_probs, strict=True)]
        if event.finish_reason is FinishReason.END_ID:
            output.finish_reason = "stop"
            assert self._parameters.end_id is not None
            output.token_ids.append(self._parameters.end_id)
            output.logprobs.append({self._parameters.end_id: Logprob(-0.5)})
        elif event.finish_reason is not None:
            output.finish_reason = {"LENGTH": "length", "TIMED_OUT": "timeout"}.get(
                event.finish_reason.name, "cancelled"
            )


class LLM:
    """`crash` is for tests."""

    def __init__(self, model: str, tokenizer: Any = None, tokenizer_mode: str = "auto",
                 skip_tokenizer_init: bool = False, trust_remote_code: bool = False, tensor_parallel_size: int = 1,
                 dtype: str = "auto", revision: str | None = None, tokenizer_revision: str | None = None,
                 **kwargs: Any) -> None:  # fmt: skip
        if unknown := set(kwargs) - LLM_ARGUMENTS:
            raise ValueError(f"validation error for TorchLlmArgs: Extra inputs are not permitted: {sorted(unknown)}")
        if not skip_tokenizer_init:
            raise RuntimeError("the checkpoint has no tokenizer")
        config = json.loads((Path(model) / "config.json").read_text())
        if config["architectures"][0] not in (
            "LlamaForCausalLM",
            "MistralForCausalLM",
            "Qwen2ForCausalLM",
            "Qwen3ForCausalLM",
        ):
            raise ValueError(f"Unknown architecture for AutoModelForCausalLM: {config['architectures'][0]}")
        kv: KvCacheConfig = kwargs.get("kv_cache_config") or KvCacheConfig()
        scheduler: SchedulerConfig = kwargs.get("scheduler_config") or SchedulerConfig()
        assert isinstance(kv, KvCacheConfig)
        assert isinstance(scheduler, SchedulerConfig)
        settings = EngineSettings(
            threads=1, max_kv_tokens=kv.max_tokens or 0, kv_cache_fraction=kv.free_gpu_memory_fraction,
            scheduler=SchedulerSettings(Policy[scheduler.capacity_scheduler_policy.name],
                                        enable_block_reuse=kv.enable_block_reuse, max_queue_size=0),
        )  # fmt: skip
        self.arguments = kwargs | {"tensor_parallel_size": tensor_parallel_size, "dtype": dtype}
        self._max_seq_len = kwargs["max_seq_len"]
        self._vocab_size = config["vocab_size"]
        limits = {name: kwargs[name] for name in ("max_batch_size", "max_num_tokens", "max_seq_len")}
        self._host = EngineHost(open_network(Path(model), limits | {"tokens_per_block": kv.tokens_per_block}, settings))
        self._running: set[RequestOutput] = set()
        self._crash = threading.Event()
        self._is_shut = False

    def generate_async(self, inputs: list[int], sampling_params: SamplingParams | None = None, lora_request: Any = None,
                       prompt_adapter_request: Any = None, streaming: bool = False,
                       kv_cache_retention_config: Any = None, disaggregated_params: Any = None,
                       _postproc_params: Any = None, scheduling_params: Any = None,
                       cache_salt: str | None = None) -> RequestOutput:  # fmt: skip
        if self._is_shut or self._crash.is_set():
            raise RuntimeError("LLM is shutting down")
        parameters = sampling_params or SamplingParams()
        if not isinstance(parameters, SamplingParams):
            raise TypeError("sampling_params must be SamplingParams")
        if parameters.end_id is None:
            raise ValueError("tokenizer is required to reset end_id if it is None")
        if len(inputs) >= self._max_seq_len:
            raise RequestError(f"The prompt length ({len(inputs)}) should not exceed max_seq_len ({self._max_seq_len})")
        if parameters.use_beam_search and (parameters.best_of or parameters.n) > self.arguments["max_beam_width"]:
            raise ValueError("beam width is larger than max_beam_width")
        return RequestOutput(self, inputs, parameters, streaming)

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """Waits for one, as long as `timeout`."""
        if self._crash.wait(min(0.02, timeout or 0)):
            raise RuntimeError("the executor's worker process has died")
        time.sleep(0)
        return [self._host.statistics()] if self.arguments.get("enable_iter_perf_stats") else []

    def shutdown(self) -> None:
        if not self._is_shut:
            self._is_shut = True
            self._host.close()

    def crash(self) -> None:
        self._crash.set()
        for output in self._running:
            output._put(RuntimeError("the executor's worker process has died"))

    def _as_ours(self, inputs: list[int], parameters: SamplingParams) -> GenerateRequest:
        bias: tuple[tuple[int, float], ...] = ()
        if parameters.embedding_bias is not None:
            assert parameters.embedding_bias.shape == (self._vocab_size,)
            values = parameters.embedding_bias.numpy()
            bias = tuple((int(token), float(values[token])) for token in np.flatnonzero(values))
        processor = parameters.logits_processor
        return GenerateRequest(
            "fake", tuple(inputs), parameters.as_ours(self._max_seq_len - len(inputs)),
            end_id=None if parameters.ignore_eos or parameters.end_id == -1 else parameters.end_id,
            bad_ids=getattr(processor, "words", ()),  # the CPU engine runs no processor
            embedding_bias=bias, num_sequences=parameters.n, return_log_probs=True,
        )  # fmt: skip
