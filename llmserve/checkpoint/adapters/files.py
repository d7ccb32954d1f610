"""A LoRA adapter's folder as PEFT saves it: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmserve.checkpoint.adapters.config import CONFIG_NAME, LoraConfig, read_lora_config
from llmserve.checkpoint.floats import is_finite
from llmserve.checkpoint.reader import MAX_LISTED
from llmserve.checkpoint.safetensors_file import SafetensorsFile
from llmserve.checkpoint.stored_tensor import FLOAT_DTYPES, Tensor, TensorInfo
from llmserve.errors import CheckpointError, raise_problems

WEIGHTS_NAME, PICKLE_NAME = "adapter_model.safetensors", "adapter_model.bin"
ADAPTER_FILES = (CONFIG_NAME, WEIGHTS_NAME)
PREFIX = "base_model.model."
DOWN, UP, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
TABLE_UP, TABLE_DOWN = ".lora_embedding_A", ".lora_embedding_B"  # for an embedding; both are stored transposed
LORA = ".lora_"
BASE_LAYER = ".base_layer"  # in names of a module's own tensors that are replaced


@dataclass(frozen=True, slots=True)
class LowRank:
    """A change to a weight [rows, columns]: `scale` times the product of `up` [rows, rank] and `down` [rank, columns]
    is added. If there is a `magnitude` [rows], each row of the sum is then scaled to that length."""

    up: Tensor
    down: Tensor
    scale: float
    magnitude: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.up), self.down.shape[1]

    def add_to(self, strip: Tensor, first: int) -> None:
        """Change rows from `first` on in place, in float32: one rank after another."""
        up = self.up[first : first + len(strip)].astype(np.float32) * np.float32(self.scale)
        product = np.empty_like(strip)
        for rank, row in enumerate(self.down.astype(np.float32)):
            np.multiply(up[:, rank : rank + 1], row, out=product)
            strip += product
        if self.magnitude is not None:
            lengths = np.sqrt(np.square(strip, dtype=np.float64).sum(axis=1))
            wanted = self.magnitude[first : first + len(strip)].astype(np.float64)
            strip *= np.divide(wanted, lengths, out=np.zeros_like(wanted), where=lengths > 0)[:, None].astype(
                np.float32
            )


@dataclass(frozen=True, slots=True)
class Adapter:
    """By the tensor's name in the base: tensors in `replaced` replace it, and `changes` are added to the result."""

    folder: Path
    changes: Mapping[str, LowRank]
    replaced: Mapping[str, Tensor]

    @classmethod
    def read(cls, folder: Path) -> Adapter:
        """Raises one CheckpointError that lists every problem of the folder itself."""
        problems: list[str] = []
        config = read_lora_config(folder, problems)
        tensors = _tensors(folder, problems)
        changes, replaced = {}, {}
        if config is not None and not problems:
            changes = dict(_changes(config, tensors, problems))
            replaced = {name: tensor for name, tensor in tensors.items() if LORA not in name}
            if not tensors:
                problems.append(f"{WEIGHTS_NAME} has no tensors")
        if len(problems) > MAX_LISTED:
            problems[MAX_LISTED:] = [f"... and {len(problems) - MAX_LISTED} more"]
        raise_problems(CheckpointError, f"adapter {folder}", problems)
        return cls(folder, changes, replaced)


def _tensors(folder: Path, problems: list[str]) -> dict[str, Tensor]:
    """All tensors of the file, with the prefix of the base's names. The file is mapped."""
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        pickled = (
            f"; {PICKLE_NAME} is not supported; save it again with safe_serialization" * (folder / PICKLE_NAME).exists()
        )
        problems.append(f"{WEIGHTS_NAME} is missing{pickled}")
        return {}
    try:
        file = SafetensorsFile(path)
    except CheckpointError as error:
        problems.append(str(error))
        return {}
    found = {}
    for name, info in file.tensors.items():
        if (problem := _problem(name, info)) or not is_finite(file.read(name)):
            problems.append(problem or f"tensor {name} has NaN or infinite values; the adapter is damaged")
        else:
            found[name.removeprefix(PREFIX).replace(BASE_LAYER, "")] = file.read(name)
    return found


def _problem(name: str, info: TensorInfo) -> str:
    if not name.startswith(PREFIX):
        return f"tensor {name} does not begin with {PREFIX}, unlike PEFT's tensors"
    if info.dtype not in FLOAT_DTYPES:
        return f"tensor {name} has dtype {info.dtype}; supported: {', '.join(FLOAT_DTYPES)}"
    return ""


def _changes(config: LoraConfig, tensors: Mapping[str, Tensor], problems: list[str]) -> Iterator[tuple[str, LowRank]]:
    """Pairs of thin matrices, by the weight that they change. Each other LoRA tensor is a problem."""
    left = {name for name in tensors if LORA in name}
    for module in dict.fromkeys(name[: name.index(LORA)] for name in sorted(left)):
        is_table = module + TABLE_UP in tensors
        up_name, down_name = (module + TABLE_UP, module + TABLE_DOWN) if is_table else (module + UP, module + DOWN)
        up, down, magnitude = (tensors.get(name) for name in (up_name, down_name, module + MAGNITUDE))
        left -= {up_name, down_name, *([module + MAGNITUDE] if config.is_dora and not is_table else [])}
        if up is None or down is None:
            problems.append(f"module {module} has only one of LoRA's two matrices")
            continue
        up, down = (up.T, down.T) if is_table else (up, down)
        if found := _shape_problem(config, module, up, down, magnitude):
            problems.append(f"module {module}: {found}")
        elif config.is_dora and magnitude is None:
            problems.append(f"module {module} has use_dora but no {MAGNITUDE.lstrip('.')}, which is not supported")
        else:
            yield f"{module}.weight", LowRank(up, down, config.scale_of(module), magnitude if config.is_dora else None)
    problems += [f"tensor {name} is not supported" for name in sorted(left)]


def _shape_problem(config: LoraConfig, module: str, up: Tensor, down: Tensor, magnitude: Tensor | None) -> str:
    rank = config.rank_of(module)
    if up.ndim != 2 or down.ndim != 2 or (up.shape[1], down.shape[0]) != (rank, rank):
        shapes = f"{list(down.shape)} and {list(up.shape)}"
        return f"matrices of the shapes {shapes} do not have the rank {rank} of {CONFIG_NAME}"
    if magnitude is not None and magnitude.shape != (len(up),):
        return f"the magnitude has the shape {list(magnitude.shape)}, not [{len(up)}]"
    return ""
