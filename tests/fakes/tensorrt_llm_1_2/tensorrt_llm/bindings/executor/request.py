"""What an executor is asked."""

import datetime
from typing import Any

import torch

from llmserve.core import SamplingParams
from tensorrt_llm.bindings.executor.checks import check, check_list
from tensorrt_llm.bindings.executor.enums import RequestType

MAX_TOP_K = 1024


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
