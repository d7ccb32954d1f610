"""The executor: our CPU engine, made from the ranks' files."""

import datetime
import itertools
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmserve.core import GenerateRequest, TokenEvent
from llmserve.engine.settings import EngineSettings
from llmserve.scheduler.settings import Policy, SchedulerSettings
from tensorrt_llm.bindings.executor.checks import check
from tensorrt_llm.bindings.executor.config import ExecutorConfig
from tensorrt_llm.bindings.executor.enums import CommunicationMode, ModelType
from tensorrt_llm.bindings.executor.request import Request, SamplingConfig
from tensorrt_llm.bindings.executor.response import Answer, IterationStats, Response
from tests.fakes.cpu_network import joined_checkpoint, open_network
from tests.fakes.host import EngineHost


class Executor:
    """Any thread may call; `await_responses` blocks. `crash` is for tests."""

    def __init__(self, model_path: Path, model_type: ModelType, executor_config: ExecutorConfig) -> None:
        check("model_path", Path(model_path), Path)
        check("model_type", model_type, ModelType)
        check("executor_config", executor_config, ExecutorConfig)
        if reason := os.environ.get("FAKE_TRTLLM_OPEN"):
            raise RuntimeError(f"[TensorRT-LLM][ERROR] Assertion failed: {reason}")
        content = json.loads((Path(model_path) / "config.json").read_text())
        limits, model = content["build_config"], content["pretrained_config"]
        _check_ranks(model["mapping"]["world_size"], executor_config)
        if executor_config.max_beam_width > limits["max_beam_width"]:
            raise RuntimeError("[TensorRT-LLM][ERROR] Assertion failed: maxBeamWidth exceeds the engine's")
        kv = executor_config.kv_cache_config
        self.config = executor_config
        _fix(executor_config, limits["plugin_config"])
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
        if str(request.max_tokens) == os.environ.get("FAKE_TRTLLM_CRASH"):
            self.crash()
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
        """await_responses(self, timeout: datetime.timedelta | None = None) -> list[Response]
        await_responses(self, id: int, timeout: datetime.timedelta | None = None) -> list[Response]
        await_responses(self, ids: collections.abc.Sequence[int], timeout: datetime.timedelta | None = None) -> list
        """
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


def _fix(config: ExecutorConfig, plugins: dict[str, Any]) -> None:
    """What the real one switches off with no more than a warning, and what it does not take."""
    if not plugins["use_paged_context_fmha"]:
        config.kv_cache_config.enable_block_reuse = False
        config.enable_chunked_context = False
    elif not config.kv_cache_config.onboard_blocks:
        raise RuntimeError(
            "[TensorRT-LLM][ERROR] Assertion failed: KV cache blocks need to be onboarded if context FMHA."
        )


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
