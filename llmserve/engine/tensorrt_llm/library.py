"""The only module that imports tensorrt_llm, and torch, which comes with it; each import happens on first use.

Nothing here runs at import, so that every command works where TensorRT-LLM cannot be installed. `installed` reads the
package's version file, because importing tensorrt_llm takes long, and starts MPI and CUDA.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from llmserve.errors import Unsupported
from llmserve.models.number_formats import WeightFormat

ENGINE_RELEASE = (1, 2)  # the last one with ahead-of-time engines
FIRST_LLM_RELEASE = (1, 3)
SAMPLER_FILES = (  # of the PyTorch sampler, in one release or another: what it does with a request's parameters
    "sampling_utils.py", "sampler/sampling_utils.py", "sampler/sampler_common.py", "sampler/penalties.py",
)  # fmt: skip
VERSION = re.compile(r"__version__\s*=\s*[\"']([^\"']+)[\"']")
INSTALL = (
    "on a machine with an NVIDIA GPU: pip install 'llmserve[tensorrt]' --extra-index-url https://pypi.nvidia.com "
    "(version 1.2.1), or a newer tensorrt-llm; NVIDIA's wheels are for Python 3.10 and 3.12 (cp310, cp312), and "
    "llmserve needs 3.11 or newer, so use 3.12; without a GPU, build with --target cpu"
)


class Mode(Enum):
    """How an engine directory is built and run."""

    ENGINE = "engine"  # rank<i>.engine, compiled by tensorrt_llm.builder, run by its C++ executor
    LLM = "llm"  # a checkpoint in canonical form and arguments, loaded by tensorrt_llm.LLM


@dataclass(frozen=True, slots=True)
class Installed:
    version: str
    mode: Mode
    folder: Path  # of the package

    def __str__(self) -> str:
        how = "ahead-of-time engines" if self.mode is Mode.ENGINE else "the LLM class, no ahead-of-time engines"
        return f"tensorrt-llm {self.version}, {self.mode.value} mode ({how})"


def installed() -> Installed:
    """The installed release. `Unsupported` if there is none, or if its interface is unknown."""
    spec = find_spec("tensorrt_llm")
    if spec is None or not spec.submodule_search_locations:
        raise Unsupported(f"the tensorrt_llm target requires tensorrt-llm, which is not installed; {INSTALL}")
    folder = Path(spec.submodule_search_locations[0])
    try:
        found = VERSION.search((folder / "version.py").read_text())
    except OSError:
        found = None
    if found is None:
        raise Unsupported(f"tensorrt-llm in {folder} does not state its version; reinstall it: {INSTALL}")
    return Installed(found[1], mode_of(found[1]), folder)


def mode_of(version: str) -> Mode:
    """1.2.x: ahead-of-time engines; 1.3 and newer: the LLM class. Other versions are `Unsupported`."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    release = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if release == ENGINE_RELEASE:
        return Mode.ENGINE
    if release >= FIRST_LLM_RELEASE:
        return Mode.LLM
    raise Unsupported(f"tensorrt-llm {version} is not supported: it must be 1.2.x, or 1.3 or newer; {INSTALL}")


def applied_parameters(folder: Path, names: Collection[str]) -> frozenset[str]:
    """Which of these sampling parameters the PyTorch sampler of 1.3 and newer applies.

    SamplingParams has all of them in every release, and the sampler silently ignores those without an implementation.
    So its source is searched: fields of UtilsSamplingParams, and what its penalties read. An import would start CUDA.
    """
    files = [folder.joinpath("_torch", "pyexecutor", name) for name in SAMPLER_FILES]
    source = "\n".join(path.read_text() for path in files if path.is_file())
    return frozenset(name for name in names if re.search(rf"(?m)^    {name}: |sampling_config\.{name}\b", source))


def tensorrt_version() -> str:
    import tensorrt

    return str(tensorrt.__version__)


@dataclass(frozen=True, slots=True)
class Builder:
    """Release 1.2: checkpoint to engine."""

    build: Any
    build_config: Any
    plugin_config: Any
    pretrained_config: Any
    models: Any  # architecture -> class


def builder() -> Builder:
    from tensorrt_llm.builder import BuildConfig, build
    from tensorrt_llm.models import MODEL_MAP
    from tensorrt_llm.models.modeling_utils import PretrainedConfig
    from tensorrt_llm.plugin import PluginConfig

    return Builder(build, BuildConfig, PluginConfig, PretrainedConfig, MODEL_MAP)


def executor() -> ModuleType:
    """Release 1.2: the bindings of the C++ executor."""
    import tensorrt_llm.bindings.executor as module

    return module  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Llm:
    """Release 1.3 and newer."""

    llm: Any
    sampling_params: Any
    kv_cache_config: Any
    scheduler_config: Any
    capacity_scheduler_policy: Any
    request_error: type[Exception]


def llm() -> Llm:
    from tensorrt_llm import LLM, SamplingParams
    from tensorrt_llm.llmapi import CapacitySchedulerPolicy, KvCacheConfig, RequestError, SchedulerConfig

    return Llm(LLM, SamplingParams, KvCacheConfig, SchedulerConfig, CapacitySchedulerPolicy, RequestError)


def float_tensor(values: NDArray[np.float32]) -> Any:
    """A torch tensor, as the bindings expect."""
    import torch

    return torch.from_numpy(values)


def quantize_weight(matrix: NDArray[Any], format: WeightFormat) -> tuple[NDArray[np.int8], NDArray[Any]]:
    """Convert one weight [outputs, inputs] of a checkpoint to the weight-only plugin's format.

    Values int8 [inputs, outputs] (of 4 bits: two in a byte, [inputs, outputs / 2]) and a scale per output in the dtype
    of `matrix`. TensorRT-LLM's own operator makes them, as in its converters (tensorrt_llm/models/convert_utils.py,
    weight_only_quantize): how values lie in memory depends on the GPU's generation and on the release.
    """
    import tensorrt_llm  # noqa: F401 - registers the operator
    import torch

    kind = {8: torch.int8, 4: torch.quint4x2}[format.bits]
    transposed = np.ascontiguousarray(matrix.T)
    bits = torch.from_numpy(transposed.view(np.int16) if transposed.dtype == ml_dtypes.bfloat16 else transposed)
    weight = bits.view(torch.bfloat16) if transposed.dtype == ml_dtypes.bfloat16 else bits
    values, scales = torch.ops.trtllm.symmetric_quantize_last_axis_of_batched_matrix(weight, kind)
    raw = (
        scales.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if scales.dtype == torch.bfloat16 else scales.numpy()
    )
    return values.numpy(), raw


class BannedSequences:
    """A logits processor for tensorrt_llm.LLM: no token may complete one of `words`.

    Its SamplingParams only supports single banned ids. It is sent to the computing process, so it must be picklable.
    """

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self.words = tuple(tuple(word) for word in words)

    def __call__(
        self, req_id: int, logits: Any, token_ids: list[list[int]], stream_ptr: int | None, client_id: int | None
    ) -> None:
        """`logits` [..., vocabulary], changed in place; `token_ids`: of each beam, including the prompt."""
        known = token_ids[0]
        for *beginning, last in self.words:
            if not beginning or known[-len(beginning) :] == beginning:
                logits[..., last] = float("-inf")
