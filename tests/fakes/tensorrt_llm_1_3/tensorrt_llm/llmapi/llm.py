import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from llmserve.core import GenerateRequest
from llmserve.engine.settings import EngineSettings
from llmserve.scheduler.settings import Policy, SchedulerSettings
from tensorrt_llm.executor.result import RequestError, RequestOutput
from tensorrt_llm.llmapi.llm_args import KvCacheConfig, SchedulerConfig, TorchLlmArgs
from tensorrt_llm.sampling_params import SamplingParams
from tests.fakes.cpu_network import open_network
from tests.fakes.host import EngineHost


class LLM:
    """`crash` is for tests."""

    def __init__(self, model: str, tokenizer: Any = None, tokenizer_mode: str = "auto",
                 skip_tokenizer_init: bool = False, trust_remote_code: bool = False, tensor_parallel_size: int = 1,
                 dtype: str = "auto", revision: str | None = None, tokenizer_revision: str | None = None,
                 **kwargs: Any) -> None:  # fmt: skip
        for key in kwargs:
            if key not in TorchLlmArgs.model_fields:
                raise ValueError(f"{self.__class__.__name__} got invalid argument: {key}")
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
        output = RequestOutput(self, inputs, parameters, streaming)
        if str(parameters.max_tokens) == os.environ.get("FAKE_TRTLLM_CRASH"):
            self.crash()
        return output

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
