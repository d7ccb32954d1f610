"""The models that the tests want: copied from the clone, or written here where the original needs a framework.

Everything is served by the Python backend, which both servers have.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

IDENTITY = '''"""Answers with what it is asked, after a while."""

import json
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.delay_s = int(config["parameters"].get("execute_delay_ms", {}).get("string_value", 0)) / 1000

    def execute(self, requests):
        time.sleep(self.delay_s)
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor(each.name().replace("IN", "OUT"), each.as_numpy()) for each in request.inputs()]
            )
            for request in requests
        ]
'''


class Model(Protocol):
    """One or several models of a group."""

    def missing(self, clone: Path) -> list[str]:
        """Files of the clone that are wanted and not there."""
        ...

    def write(self, clone: Path, repository: Path) -> None: ...


@dataclass(frozen=True)
class Identity:
    name: str
    datatype: str
    dims: Sequence[int]
    max_batch_size: int
    count: int = 1  # of inputs, and of outputs
    delay_ms: int = 0
    text: str = ""  # of its config, besides

    def missing(self, clone: Path) -> list[str]:
        return []

    def write(self, clone: Path, repository: Path) -> None:
        tensors = "\n".join(
            f'{kind} {{ name: "{kind.upper()}{number}" data_type: TYPE_{self.datatype} dims: {list(self.dims)} }}'
            for number in range(self.count)
            for kind in ("input", "output")
        )
        _write(
            repository / self.name,
            f'backend: "python"\nmax_batch_size: {self.max_batch_size}\n{tensors}\n{self.text}\n'
            f'parameters {{ key: "execute_delay_ms" value {{ string_value: "{self.delay_ms}" }} }}\n'
            "instance_group { count: 1 kind: KIND_CPU }\n",
            IDENTITY,
        )


@dataclass(frozen=True)
class Ensemble:
    """One model after the other, each with INPUT0 and OUTPUT0."""

    name: str
    steps: Sequence[str]

    def missing(self, clone: Path) -> list[str]:
        return []

    def write(self, clone: Path, repository: Path) -> None:
        names = ["ENSEMBLE_INPUT0", *(f"between_{number}" for number in range(1, len(self.steps))), "ENSEMBLE_OUTPUT0"]
        steps = "\n".join(
            f'step {{ model_name: "{step}" model_version: -1 input_map {{ key: "INPUT0" value: "{names[number]}" }} '
            f'output_map {{ key: "OUTPUT0" value: "{names[number + 1]}" }} }}'
            for number, step in enumerate(self.steps)
        )
        tensor = "data_type: TYPE_FP32 dims: [ 1 ]"
        _write(
            repository / self.name,
            f'platform: "ensemble"\nmax_batch_size: 4\ninput {{ name: "{names[0]}" {tensor} }}\n'
            f'output {{ name: "{names[-1]}" {tensor} }}\nensemble_scheduling {{ {steps} }}\n',
        )


@dataclass(frozen=True)
class Copied:
    """A folder of models, from the first place of the clone that has it."""

    def __init__(self, *places: str) -> None:
        object.__setattr__(self, "places", places)

    places: tuple[str, ...] = ()

    def missing(self, clone: Path) -> list[str]:
        return [] if any((clone / place).is_dir() for place in self.places) else [" or ".join(self.places)]

    def write(self, clone: Path, repository: Path) -> None:
        place = next(clone / place for place in self.places if (clone / place).is_dir())
        for model in place.iterdir():
            if (model / "config.pbtxt").exists():
                shutil.copytree(model, repository / model.name)
                (repository / model.name / "1").mkdir(exist_ok=True)


@dataclass(frozen=True)
class ResponseSenders:
    """One source, eight models: decoupled or not, async or not, with batches or not."""

    place: str

    def missing(self, clone: Path) -> list[str]:
        names = ("config.pbtxt", "model.py", "model_async.py", "model_common.py")
        return [f"{self.place}/{name}" for name in names if not (clone / self.place / name).exists()]

    def write(self, clone: Path, repository: Path) -> None:
        source = clone / self.place
        config = (source / "config.pbtxt").read_text()
        common = (source / "model_common.py").read_text()
        for decoupled in ("", "_decoupled"):
            for is_async in ("", "_async"):
                for batching in ("", "_batching"):
                    name = f"response_sender{decoupled}{is_async}{batching}"
                    text = config.replace("response_sender", name)
                    text += "\nmodel_transaction_policy { decoupled: True }\n" if decoupled else ""
                    text += "\ndynamic_batching { max_queue_delay_microseconds: 500000 }\n" if batching else ""
                    _write(repository / name, text, (source / f"model{is_async}.py").read_text())
                    (repository / name / "1/response_sender_model_common.py").write_text(common)
                    (repository / name / "1/model_common.py").write_text(common)


def _write(directory: Path, config: str, code: str | None = None) -> None:
    (directory / "1").mkdir(parents=True)
    (directory / "config.pbtxt").write_text(config)
    if code is not None:
        (directory / "1/model.py").write_text(code)
