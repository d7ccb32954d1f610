"""Compiles the ranks of a TensorRT-LLM checkpoint, each in its own process, which sees one GPU.

Uses release 1.2 like its own trtllm-build (tensorrt_llm/commands/build.py: build_model, build_and_save,
parallel_build). A compiler that crashes or runs out of memory ends its process, not the build.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from llmserve.builder.options import BuildOptions
from llmserve.builder.targets.tensorrt_llm.options import TensorrtLlmOptions
from llmserve.engine.tensorrt_llm import library
from llmserve.errors import InternalError

DEFAULT_OPT_BATCH_SIZE = 8  # of BuildConfig; more than max_batch_size has no effect
NO_PLUGIN = "disable"


@dataclass(frozen=True, slots=True)
class RankJob:
    """One rank's build, as it is sent to its process."""

    checkpoint: str
    output: str
    rank: int
    gpu: str  # UUID
    limits: Mapping[str, Any]
    plugins: Mapping[str, Any]
    input_timing_cache: str | None
    output_timing_cache: str


def limits_of(options: BuildOptions) -> dict[str, Any]:
    """Arguments for BuildConfig."""
    own = options.of(TensorrtLlmOptions)
    return {
        "max_batch_size": options.max_batch_size,
        "opt_batch_size": min(DEFAULT_OPT_BATCH_SIZE, options.max_batch_size),
        "max_input_len": own.max_input_len or options.max_seq_len - 1,
        "max_seq_len": options.max_seq_len,
        "max_num_tokens": options.max_num_tokens,
        "max_beam_width": own.max_beam_width,
    }


def plugins_of(options: BuildOptions) -> dict[str, Any]:
    """Arguments for PluginConfig. Missing ones keep their defaults."""
    given = options.of(TensorrtLlmOptions)
    return {
        "gpt_attention_plugin": _plugin(given.gpt_attention_plugin),
        "gemm_plugin": _plugin(given.gemm_plugin),
        "weight_only_quant_matmul_plugin": "auto" if options.quantization else None,
        "context_fmha": given.context_fmha == "enable",
        "remove_input_padding": given.remove_input_padding == "enable",
        "tokens_per_block": options.tokens_per_block,
        "multiple_profiles": given.multiple_profiles == "enable",
        "reduce_fusion": given.reduce_fusion == "enable",
        "use_fused_mlp": not options.quantization,  # trtllm-build: fused only without quantization, or with FP8
    }


def _plugin(value: str) -> str | None:
    return None if value == NO_PLUGIN else value


def build_ranks(jobs: Sequence[RankJob], num_workers: int) -> str:
    """Build every rank, `num_workers` at a time. Returns the version of TensorRT that compiled them.

    The first failure is raised as InternalError after running builds have ended; the others do not start.
    """
    versions = set()
    pool = ProcessPoolExecutor(num_workers, get_context("spawn"), max_tasks_per_child=1)  # one GPU per process
    with pool:
        ranks = {pool.submit(build_rank, job): job.rank for job in jobs}
        for done in as_completed(ranks):
            try:
                versions.add(done.result())
            except Exception as error:
                pool.shutdown(wait=True, cancel_futures=True)
                raise InternalError(_failure(ranks[done], error)) from error
    return ", ".join(sorted(versions))


def _failure(rank: int, error: Exception) -> str:
    if isinstance(error, BrokenProcessPool):
        return (
            f"the process that built rank {rank} ended abnormally, usually because memory ran out; its last output is "
            "above. Use fewer --workers, or a smaller --max-batch-size or --max-num-tokens"
        )
    return f"tensorrt_llm could not build rank {rank}: {type(error).__name__}: {error}"


def build_rank(job: RankJob) -> str:
    """Runs in a worker process. Returns TensorRT's version."""
    os.environ["CUDA_VISIBLE_DEVICES"] = job.gpu  # before CUDA starts, which importing tensorrt_llm does
    tensorrt_llm = library.builder()
    config = tensorrt_llm.pretrained_config.from_json_file(str(Path(job.checkpoint) / "config.json"))
    config.set_rank(job.rank)
    model = tensorrt_llm.models[config.architecture].from_checkpoint(job.checkpoint, config=config)
    build_config = tensorrt_llm.build_config(
        **job.limits,
        input_timing_cache=job.input_timing_cache,
        output_timing_cache=job.output_timing_cache,
        plugin_config=tensorrt_llm.plugin_config(**job.plugins),
    )
    engine = tensorrt_llm.build(model, build_config)
    if engine is None:
        raise RuntimeError("tensorrt_llm.builder.build returned no engine; its log above says why")
    engine.save(job.output)
    return library.tensorrt_version()
