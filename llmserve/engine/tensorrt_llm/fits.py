"""Whether an engine directory of the tensorrt_llm target can run on this machine; if not, why, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.machine.nvidia import Gpu, visible_gpus
from llmserve.engine.tensorrt_llm import library
from llmserve.engine.tensorrt_llm.library import Installed, Mode
from llmserve.errors import LlmserveError

CANONICAL_FOLDER = "checkpoint"  # LLM mode: the checkpoint that tensorrt_llm.LLM loads
LLM_ARGUMENTS_FILE = "llm_args.json"
REBUILD = "build it again on this machine: llmserve build CHECKPOINT --target tensorrt_llm"


def rank_file(rank: int) -> str:
    return f"rank{rank}.engine"


def mode_of(directory: EngineDirectory) -> Mode:
    return Mode(directory.manifest.device["mode"])


def machine_problems(
    find: Callable[[], Installed] = library.installed, gpus: Callable[[], Sequence[Gpu]] = visible_gpus
) -> list[str]:
    """Why no engine can be built or run here; empty if there are a supported library and a GPU."""
    found = []
    for ask in (find, gpus):
        try:
            ask()
        except LlmserveError as error:
            found.append(str(error))
    return found


def fit_problems(
    directory: EngineDirectory,
    *,
    find: Callable[[], Installed] = library.installed,
    gpus: Callable[[], Sequence[Gpu]] = visible_gpus,
    tensorrt: Callable[[], str] = library.tensorrt_version,
) -> list[str]:
    """Everything that prevents this engine from running here; empty if nothing does."""
    found = _file_problems(directory)
    try:
        found += _version_problems(directory, find(), tensorrt)
    except LlmserveError as error:
        found.append(str(error))
    try:
        found += _gpu_problems(directory, gpus())
    except LlmserveError as error:
        found.append(str(error))
    return found


def _world_size(directory: EngineDirectory) -> int:
    return int(directory.manifest.device["world_size"])


def _file_problems(directory: EngineDirectory) -> list[str]:
    if mode_of(directory) is Mode.LLM:
        wanted = [LLM_ARGUMENTS_FILE, f"{CANONICAL_FOLDER}/config.json"]
    else:
        wanted = [rank_file(rank) for rank in range(_world_size(directory))]
        mapping = directory.config["pretrained_config"].get("mapping", {})
        if mapping.get("world_size", 1) != _world_size(directory):
            return [
                f"config.json is for {mapping.get('world_size', 1)} GPUs, the manifest for {_world_size(directory)}: "
                f"the directory mixes files of two builds; {REBUILD}"
            ]
    missing = [name for name in wanted if name not in directory.manifest.files]
    return [f"the engine is for {_world_size(directory)} GPUs, but lacks {name}; {REBUILD}" for name in missing]


def _version_problems(directory: EngineDirectory, here: Installed, tensorrt: Callable[[], str]) -> list[str]:
    """A compiled engine requires one version of TensorRT-LLM and of TensorRT; a canonical checkpoint does not."""
    built, mode = directory.manifest.device["tensorrt_llm"], mode_of(directory)
    if mode is not here.mode or (mode is Mode.ENGINE and built != here.version):
        return [f"built with tensorrt-llm {built} ({mode.value} mode); this machine has {here}; {REBUILD}"]
    if mode is Mode.LLM:
        return []
    compiled_by = directory.manifest.device["tensorrt"]
    try:
        version = tensorrt()
    except ImportError as error:
        return [f"TensorRT cannot be imported: {error}; install tensorrt-llm again, TensorRT comes with it"]
    return [] if version == compiled_by else [f"compiled by TensorRT {compiled_by}; installed is {version}; {REBUILD}"]


def _gpu_problems(directory: EngineDirectory, gpus: Sequence[Gpu]) -> list[str]:
    needed, device = _world_size(directory), directory.manifest.device
    found = []
    if len(gpus) < needed:
        found.append(
            f"the engine needs {needed} GPUs, but this process sees {len(gpus)}; use a machine with more, or build "
            f"with --tp-size {len(gpus)}"
        )
    if mode_of(directory) is Mode.ENGINE:
        found += [
            f"built for compute capability {device['compute_capability']} ({device['gpu']}), but GPU {gpu.index} is a "
            f"{gpu}; {REBUILD}"
            for gpu in gpus[:needed]
            if gpu.compute_capability != device["compute_capability"]
        ]
    return found + _memory_problems(directory, gpus[:needed])


def _memory_problems(directory: EngineDirectory, gpus: Sequence[Gpu]) -> list[str]:
    """Only weights; the KV cache uses the rest. GPUs that do not report their memory are not checked."""
    weights = [record.num_bytes for name, record in directory.manifest.files.items() if _is_weight_file(Path(name))]
    needed = sum(weights) // _world_size(directory)
    return [
        f"a GPU's part of the weights is {_size(needed)}, but GPU {gpu.index} ({gpu.name}) has "
        f"{_size(gpu.free_bytes)} free; stop other programs on it (nvidia-smi lists them), or build with a larger "
        "--tp-size or with --use-weight-only"
        for gpu in gpus
        if gpu.total_bytes and gpu.free_bytes < needed
    ]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _is_weight_file(path: Path) -> bool:
    return path.suffix in (".engine", ".safetensors")
