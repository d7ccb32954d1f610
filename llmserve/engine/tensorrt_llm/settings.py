"""Which of an operator's settings each mode of TensorRT-LLM supports."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from llmserve.engine.tensorrt_llm.library import Mode

BOTH_MODES = (
    "max_beam_width", "enable_chunked_context", "max_attention_window_size", "sink_token_length",
    "kv_cache_host_memory_bytes", "kv_cache_onboard_blocks", "iter_stats_max_iterations",
)  # fmt: skip
ENGINE_ONLY = (
    "gpu_device_ids", "executor_worker_path", "normalize_log_probs", "multi_block_mode", "enable_context_fmha_fp32_acc",
    "cuda_graph_mode", "cuda_graph_cache_size", "gpu_weights_percent",
)  # fmt: skip
HONOURED: Mapping[Mode, Collection[str]] = {Mode.ENGINE: (*BOTH_MODES, *ENGINE_ONLY), Mode.LLM: BOTH_MODES}
