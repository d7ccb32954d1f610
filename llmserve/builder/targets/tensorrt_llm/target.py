"""The `tensorrt_llm` target: engines for NVIDIA GPUs. The installed release determines which of its two modes builds.

Engine mode (1.2): our weight plan -> a TensorRT-LLM checkpoint -> tensorrt_llm.builder -> rank<i>.engine.
LLM mode (1.3 and newer): our weight plan -> a checkpoint in canonical form, and the arguments of tensorrt_llm.LLM.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.builder.config import engine_config
from llmserve.builder.options import BuildOptions
from llmserve.builder.quantization import WeightPart
from llmserve.builder.targets.base import CompileJob, Network, Target, no_kernels, quantization_problems
from llmserve.builder.targets.tensorrt_llm.canonical import (
    canonical_bytes,
    canonical_problems,
    write_canonical,
)
from llmserve.builder.targets.tensorrt_llm.checkpoint import (
    checkpoint_architecture,
    checkpoint_bytes,
    checkpoint_problems,
    write_checkpoint,
)
from llmserve.builder.targets.tensorrt_llm.expressible import network_problems
from llmserve.builder.targets.tensorrt_llm.options import DEFAULTS, TensorrtLlmOptions
from llmserve.builder.targets.tensorrt_llm.ranks import RankJob, build_ranks, limits_of, plugins_of
from llmserve.engine.directory.artifact import CACHE_FILE, CONFIG_FILE, MANIFEST_FILE
from llmserve.engine.machine.nvidia import Gpu, visible_gpus
from llmserve.engine.tensorrt_llm import library
from llmserve.engine.tensorrt_llm.fits import CANONICAL_FOLDER, LLM_ARGUMENTS_FILE, machine_problems, rank_file
from llmserve.engine.tensorrt_llm.library import Installed, Mode
from llmserve.errors import InternalError, LlmserveError, ResourceExhausted
from llmserve.models.graph import Program
from llmserve.models.number_formats import ROUNDED, NumberFormat
from llmserve.models.spec import DecoderSpec, HfConfig, Param
from llmserve.progress import Progress

PLUGIN_OPTIONS = (
    "gemm_plugin", "gpt_attention_plugin", "context_fmha", "remove_input_padding", "multiple_profiles",
    "reduce_fusion", "workers", "parallel_build", "max_input_len",
)  # fmt: skip
NO_WEIGHT_ONLY = ((10, 0), (12, 0))  # builder.build refuses compute capabilities from the first to below the second
REDUCE_FUSION_OF = "LlamaForCausalLM"  # the only one of our classes that builder.build applies it to, on several GPUs
QK_NORM_EPS = 1e-05  # the default of Attention's q_layernorm and k_layernorm, which QWenDecoderLayer does not override
IN_FLIGHT = "the executor batches in flight, which needs a paged KV cache, the attention plugin and no padding"


class TensorrtLlmTarget:
    """The target for one checkpoint. `find` and `gpus` describe this machine."""

    name = "tensorrt_llm"
    times_tactics = False
    has_selftest = False
    rounds_activations = False
    rounds_tables = False

    def __init__(
        self,
        spec: DecoderSpec,
        config: HfConfig,
        *,
        find: Callable[[], Installed] = library.installed,
        gpus: Callable[[], Sequence[Gpu]] = visible_gpus,
    ) -> None:
        self._spec = spec
        self._config = config
        self._find = find
        self._gpus = gpus

    def problems(self, program: Program, params: Sequence[Param], options: BuildOptions) -> list[str]:
        found = [*_option_problems(options), *network_problems(self._spec, program, params)]
        found += quantization_problems(options, ROUNDED.values())
        if self._mode() is Mode.LLM:
            return [*found, *canonical_problems(self._spec, options)]
        return [*found, *checkpoint_problems(self._spec, self._config, options), *self._gpu_problems(options)]

    def notes(self, options: BuildOptions) -> list[str]:
        given = options.of(TensorrtLlmOptions)
        if self._mode() is not Mode.LLM:
            return self._engine_notes(given)
        return [
            f"{name} {getattr(given, name)} has no effect: tensorrt_llm.LLM compiles no engine"
            for name in PLUGIN_OPTIONS
            if getattr(given, name) != getattr(DEFAULTS, name)
        ]

    def machine_problems(self, options: BuildOptions) -> list[str]:
        return machine_problems(self._find, self._gpus)

    def engine_bytes(self, network: Network, parts: Mapping[str, Sequence[WeightPart]]) -> int:
        """The size of the weights. A compiled engine is slightly larger."""
        if self._mode() is Mode.LLM:
            return canonical_bytes(network.params, self._spec, network.options)
        return checkpoint_bytes(network.params, self._spec, network.options)

    def cache_format(self, options: BuildOptions) -> NumberFormat:
        return options.cache()

    def kv_bytes_per_token(self, program: Program, options: BuildOptions) -> int:
        cache = program.cache
        return options.cache().num_bytes(2 * cache.num_layers * cache.num_kv_heads * cache.head_dim)

    def kv_bytes_of(self, program: Program, options: BuildOptions, num_tokens: int) -> int:
        return options.in_whole_blocks(num_tokens) * self.kv_bytes_per_token(program, options)

    def available_bytes(self) -> int:
        return 0

    def read_bytes_per_s(self) -> float:
        return 0.0  # a plan can be made without a GPU

    def compile(self, job: CompileJob, directory: Path) -> Mapping[str, Any]:
        found, gpus = self._find(), self._gpus()
        facts = {
            "mode": found.mode.value,
            "tensorrt_llm": found.version,
            "gpu": gpus[0].name,
            "compute_capability": gpus[0].compute_capability,
            "driver": gpus[0].driver,
            "world_size": job.options.of(TensorrtLlmOptions).world_size,
        }
        if found.mode is Mode.LLM:
            self._write_llm(job, directory)
            return facts
        return facts | {"tensorrt": self._build_engines(job, directory, gpus)}

    def compile_kernels(self, network: Network, output: Path, progress: Progress, threads: int) -> str:
        raise no_kernels(self.name)

    def tune(self, directory: Path, earlier: Path, progress: Progress) -> None:
        """TensorRT measures its tactics while it compiles."""

    def _write_llm(self, job: CompileJob, directory: Path) -> None:
        folder = directory / CANONICAL_FOLDER
        folder.mkdir()
        write_canonical(job, folder, spec=self._spec, config=self._config)
        own = job.options.of(TensorrtLlmOptions)
        sizes = {"tp_size": own.tp_size, "pp_size": own.pp_size, "max_beam_width": own.max_beam_width}
        config = engine_config(self._spec, job.program, job.options, **sizes)
        for name, content in ((LLM_ARGUMENTS_FILE, llm_arguments(job.options)), (CONFIG_FILE, config)):
            (directory / name).write_text(json.dumps(content, indent=2) + "\n")

    def _build_engines(self, job: CompileJob, directory: Path, gpus: Sequence[Gpu]) -> str:
        """Returns TensorRT's version. Deletes the checkpoint afterwards."""
        needed = 2 * checkpoint_bytes(job.params, self._spec, job.options)
        free = shutil.disk_usage(directory).free
        if free < needed:
            raise ResourceExhausted(
                f"the checkpoint for TensorRT-LLM and the engines together need {needed / 2**20:.0f} MiB, but "
                f"{directory.parent} has {free / 2**20:.0f} MiB free; free some space or choose another --output-dir"
            )
        with tempfile.TemporaryDirectory(prefix=".checkpoint-", dir=directory) as checkpoint:
            write_checkpoint(
                job, Path(checkpoint), spec=self._spec, config=self._config, quantize=library.quantize_weight
            )
            jobs = rank_jobs(job, Path(checkpoint), directory, gpus)
            version = build_ranks(jobs, num_workers(job.options, gpus))
        missing = [name for rank in range(len(jobs)) if not (directory / (name := rank_file(rank))).is_file()]
        if missing:
            raise InternalError(f"tensorrt_llm.builder did not write {', '.join(missing)}")
        return version

    def _engine_notes(self, given: TensorrtLlmOptions) -> list[str]:
        """Effects of the real builder and classes that no option changes."""
        found = []
        fuses = given.tp_size > 1 and checkpoint_architecture(self._spec) == REDUCE_FUSION_OF
        if given.reduce_fusion == "enable" and not fuses:
            found.append("reduce_fusion enable has no effect: TensorRT-LLM supports it for Llama on several GPUs only")
        if self._spec.architecture == "Qwen3ForCausalLM" and self._spec.norm_eps != QK_NORM_EPS:
            found.append(
                f"TensorRT-LLM's Qwen3 normalizes queries and keys with eps {QK_NORM_EPS}, the checkpoint with "
                f"{self._spec.norm_eps}: answers may differ in the last bits"
            )
        return found

    def _gpu_problems(self, options: BuildOptions) -> list[str]:
        """If there is no GPU, `machine_problems` reports it."""
        try:
            gpus = self._gpus() if options.quantization else ()
        except LlmserveError:
            return []
        first, end = NO_WEIGHT_ONLY
        return [
            f"TensorRT-LLM builds no weight-only engine for GPU {gpu.index}, a {gpu}: its kernels are for compute "
            f"capabilities below {first[0]}.{first[1]} and from {end[0]}.{end[1]} on; leave out quantization"
            for gpu in gpus
            if first <= tuple(map(int, gpu.compute_capability.split("."))) < end
        ]

    def _mode(self) -> Mode:
        """If nothing is installed, requirements are checked for the release that compiles engines."""
        try:
            return self._find().mode
        except LlmserveError:
            return Mode.ENGINE


def make_target(spec: DecoderSpec, config: HfConfig) -> Target:
    return TensorrtLlmTarget(spec, config)


def num_workers(options: BuildOptions, gpus: Sequence[Gpu]) -> int:
    """The requested number of workers, but at most one per rank and one per GPU."""
    own = options.of(TensorrtLlmOptions)
    return min(len(gpus) if own.parallel_build else own.workers, len(gpus), own.world_size)


def rank_jobs(job: CompileJob, checkpoint: Path, directory: Path, gpus: Sequence[Gpu]) -> list[RankJob]:
    """Rank 0 writes its timing cache to the engine directory, for the next build of that engine."""
    workers = num_workers(job.options, gpus)
    earlier = timing_cache(job.earlier, gpus[0])
    return [
        RankJob(
            checkpoint=str(checkpoint),
            output=str(directory),
            rank=rank,
            gpu=gpus[rank % workers].uuid,
            limits=limits_of(job.options),
            plugins=plugins_of(job.options),
            input_timing_cache=None if earlier is None else str(earlier),
            output_timing_cache=str(directory / CACHE_FILE if rank == 0 else checkpoint / f"rank{rank}.cache"),
        )
        for rank in range(job.options.of(TensorrtLlmOptions).world_size)
    ]


def timing_cache(earlier: Path | None, gpu: Gpu) -> Path | None:
    """The timings of an earlier build, if TensorRT's version and the GPU are the same."""
    if earlier is None or not (earlier / CACHE_FILE).is_file():
        return None
    try:
        manifest = json.loads((earlier / MANIFEST_FILE).read_text())
        same = manifest["target"] == TensorrtLlmTarget.name and manifest["device"]["gpu"] == gpu.name
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return earlier / CACHE_FILE if same else None


def llm_arguments(options: BuildOptions) -> dict[str, Any]:
    """Arguments of tensorrt_llm.LLM that the build determines."""
    own = options.of(TensorrtLlmOptions)
    return {
        "tensor_parallel_size": own.tp_size,
        "pipeline_parallel_size": own.pp_size,
        "dtype": options.dtype,
        "max_batch_size": options.max_batch_size,
        "max_num_tokens": options.max_num_tokens,
        "max_seq_len": options.max_seq_len,
        "max_beam_width": own.max_beam_width,
    }


def _option_problems(options: BuildOptions) -> list[str]:
    given = options.of(TensorrtLlmOptions)
    rules = [
        (
            not options.cache().is_rounded,
            f"kv_cache_dtype {options.kv_cache_dtype}: TensorRT-LLM requires calibrated scales for it; leave it out",
        ),
        (given.kv_cache_type == "paged", f"kv_cache_type {given.kv_cache_type} cannot be served: {IN_FLIGHT}"),
        (given.gpt_attention_plugin != "disable", f"gpt_attention_plugin disable cannot be served: {IN_FLIGHT}"),
        (given.remove_input_padding == "enable", f"remove_input_padding disable cannot be served: {IN_FLIGHT}"),
        (
            given.max_input_len < options.max_seq_len or not given.max_input_len,
            f"max_input_len {given.max_input_len} leaves no token for the answer: max_seq_len is {options.max_seq_len}",
        ),
    ]
    return [text for holds, text in rules if not holds]
