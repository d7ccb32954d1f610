"""The models of the tests: copied from the clone, or written here if the original needs a framework.

All models run on the Python backend, which both servers have.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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


ADD_SUB = '''"""Answers with the sum and the difference of what it is asked."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.inputs = [each["name"] for each in config["input"]]
        outputs = [each["name"] for each in config["output"]]
        self.is_swapped = config["parameters"]["is_swapped"]["string_value"] == "True"
        self.outputs = outputs[::-1] if self.is_swapped else outputs

    def execute(self, requests):
        responses = []
        for request in requests:
            one, other = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self.inputs)
            results = zip(self.outputs, (one + other, one - other))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor(*each) for each in results]))
        return responses
'''
REPEAT = '''"""A response for each element of IN, each after its DELAY, and leaves `execute` after WAIT milliseconds."""

import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            values, delays, wait = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("IN", "DELAY", "WAIT")
            )
            sender = request.get_response_sender()
            if values.shape != delays.shape:
                text = f"expected IN and DELAY shape to match, got {list(values.shape)} and {list(delays.shape)}"
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(text)), flags=FINAL)
                continue
            threading.Thread(target=self.respond, args=(sender, values, delays), daemon=True).start()
            time.sleep(int(wait[0]) / 1000)

    def respond(self, sender, values, delays):
        for index, (value, delay) in enumerate(zip(values, delays)):
            time.sleep(int(delay) / 1000)
            tensors = [
                pb_utils.Tensor("OUT", np.array([value], np.int32)),
                pb_utils.Tensor("IDX", np.array([index], np.uint32)),
            ]
            sender.send(pb_utils.InferenceResponse(tensors))
        sender.send(flags=FINAL)
'''
SQUARE = '''"""As many responses as IN says, each with IN."""

import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            threading.Thread(target=self.respond, args=(request.get_response_sender(), value), daemon=True).start()

    def respond(self, sender, value):
        for _ in range(int(value[0])):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''
SERVED_BY_PYTHON = ('backend: "identity"', 'backend: "python"')
ONE_INTEGER = "data_type: TYPE_INT32 dims: [ 1 ]"
DECOUPLED = "model_transaction_policy { decoupled: true }"


class Model(Protocol):
    """One or several models of a group."""

    def missing(self, clone: Path) -> list[str]:
        """Returns required files that the clone does not have."""
        ...

    def write(self, clone: Path, repository: Path) -> None: ...


@dataclass(frozen=True)
class Written:
    """A model that is written here, independent of the clone."""

    name: str

    def missing(self, clone: Path) -> list[str]:
        return []


@dataclass(frozen=True)
class Identity(Written):
    datatype: str
    dims: Sequence[int]
    max_batch_size: int
    count: int = 1  # of inputs, and of outputs
    delay_ms: int = 0
    text: str = ""  # additional text of its config

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
class AddSub(Written):
    datatype: str
    dims: Sequence[int]
    max_batch_size: int = 0
    between: str = ""  # between INPUT or OUTPUT and the number
    is_swapped: bool = False  # whether the difference comes first
    versions: Sequence[int] = (1,)

    @property
    def interface(self) -> str:
        """Its tensors and versions, in the format of a config."""
        tensor = f"data_type: TYPE_{self.datatype} dims: {list(self.dims)}"
        tensors = [
            f'{kind} {{ name: "{kind.upper()}{self.between}{number}" {tensor} }}'
            for kind in ("input", "output")
            for number in range(2)
        ]
        return "\n".join([*tensors, f"version_policy {{ specific {{ versions: {list(self.versions)} }} }}"])

    def write(self, clone: Path, repository: Path) -> None:
        _write(
            repository / self.name,
            f'backend: "python"\nmax_batch_size: {self.max_batch_size}\n{self.interface}\n'
            f'parameters {{ key: "is_swapped" value {{ string_value: "{self.is_swapped}" }} }}\n'
            "instance_group { count: 1 kind: KIND_CPU }\n",
            ADD_SUB,
            self.versions,
        )


@dataclass(frozen=True)
class Repeat(Written):
    tensors: str = (
        'input { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] } '
        'input { name: "DELAY" data_type: TYPE_UINT32 dims: [ -1 ] } '
        'input { name: "WAIT" data_type: TYPE_UINT32 dims: [ 1 ] }\n'
        'output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } '
        'output { name: "IDX" data_type: TYPE_UINT32 dims: [ 1 ] }'
    )
    code: str = REPEAT

    def write(self, clone: Path, repository: Path) -> None:
        _write(repository / self.name, f'backend: "python"\n{self.tensors}\n{DECOUPLED}\n', self.code)


@dataclass(frozen=True)
class Square(Repeat):
    tensors: str = f'input {{ name: "IN" {ONE_INTEGER} }}\noutput {{ name: "OUT" {ONE_INTEGER} }}'
    code: str = SQUARE


@dataclass(frozen=True)
class Ensemble(Written):
    """Models in sequence, each with INPUT0 and OUTPUT0."""

    steps: Sequence[str]
    ends: tuple[str, str] = ("ENSEMBLE_INPUT0", "ENSEMBLE_OUTPUT0")
    max_batch_size: int = 4
    dims: Sequence[int] = (1,)

    def write(self, clone: Path, repository: Path) -> None:
        names = [self.ends[0], *(f"between_{number}" for number in range(1, len(self.steps))), self.ends[1]]
        steps = "\n".join(
            f'step {{ model_name: "{step}" model_version: -1 input_map {{ key: "INPUT0" value: "{names[number]}" }} '
            f'output_map {{ key: "OUTPUT0" value: "{names[number + 1]}" }} }}'
            for number, step in enumerate(self.steps)
        )
        tensor = f"data_type: TYPE_FP32 dims: {list(self.dims)}"
        _write(
            repository / self.name,
            f'platform: "ensemble"\nmax_batch_size: {self.max_batch_size}\ninput {{ name: "{names[0]}" {tensor} }}\n'
            f'output {{ name: "{names[-1]}" {tensor} }}\nensemble_scheduling {{ {steps} }}\n',
        )


@dataclass(frozen=True)
class AroundAddSub(Written):
    """An ensemble of one AddSub, with the same tensors and versions."""

    step: AddSub

    def write(self, clone: Path, repository: Path) -> None:
        maps = " ".join(
            f'{kind}_map {{ key: "{kind.upper()}{number}" value: "{kind.upper()}{number}" }}'
            for kind in ("input", "output")
            for number in range(2)
        )
        _write(
            repository / self.name,
            f'platform: "ensemble"\nmax_batch_size: {self.step.max_batch_size}\n{self.step.interface}\n'
            f'ensemble_scheduling {{ step {{ model_name: "{self.step.name}" model_version: -1 {maps} }} }}\n',
            versions=self.step.versions,
        )


class Copied:
    """A folder of models, from the first place of the clone that has it.

    The Python backend serves models of the identity backend, which a Triton of `make compat` does not have.
    """

    def __init__(self, *places: str, without: Sequence[str] = (), text: str = "") -> None:
        """`text`: additional text of their configs."""
        self.places, self.without, self.text = places, without, text

    def missing(self, clone: Path) -> list[str]:
        return [] if any((clone / place).is_dir() for place in self.places) else [" or ".join(self.places)]

    def write(self, clone: Path, repository: Path) -> None:
        place = next(clone / place for place in self.places if (clone / place).is_dir())
        for model in place.iterdir():
            if model.name in self.without or (
                not (model / "config.pbtxt").exists() and not any(model.glob("*/model.py"))
            ):
                continue
            copy = shutil.copytree(model, repository / model.name)
            (copy / "1").mkdir(exist_ok=True)
            if (config := copy / "config.pbtxt").exists():
                text = config.read_text()
                config.write_text(f"{text.replace(*SERVED_BY_PYTHON)}\n{self.text}\n")
                if SERVED_BY_PYTHON[0] in text:
                    (copy / "1/model.py").write_text(IDENTITY)


@dataclass(frozen=True)
class PythonModel:
    """A model of `qa/python_models`, with another name and config."""

    name: str
    source: str = ""  # its folder, if not its name
    changes: Mapping[str, str] = field(default_factory=dict)  # replacements in its config
    text: str = ""  # additional text of its config

    @property
    def place(self) -> str:
        return f"qa/python_models/{self.source or self.name}"

    def missing(self, clone: Path) -> list[str]:
        return [] if (clone / self.place).is_dir() else [self.place]

    def write(self, clone: Path, repository: Path) -> None:
        place, copy = clone / self.place, repository / self.name
        (copy / "1").mkdir(parents=True)
        for code in place.glob("*.py"):
            shutil.copy(code, copy / "1")
        if (config := place / "config.pbtxt").exists():
            text = config.read_text().replace(f'name: "{self.source}"', f'name: "{self.name}"')
            for old, new in self.changes.items():
                text = text.replace(old, new)
            (copy / "config.pbtxt").write_text(f"{text}\n{self.text}\n")


@dataclass(frozen=True)
class ResponseSenders:
    """Eight models of one source: decoupled or not, async or not, with batches or not."""

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


def _write(directory: Path, config: str, code: str | None = None, versions: Sequence[int] = (1,)) -> None:
    for version in versions:
        (directory / str(version)).mkdir(parents=True)
        if code is not None:
            (directory / str(version) / "model.py").write_text(code)
    (directory / "config.pbtxt").write_text(config)
