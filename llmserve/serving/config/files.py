"""Restricts a config's files to the model's directory: clients may send configs, and labels are sent to clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from tritonclient.grpc.model_config_pb2 import ModelConfig


def is_inside(relative: str) -> bool:
    """Whether a relative path stays inside its directory, judged by its text only."""
    path = PurePosixPath(relative)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in relative


def path_problems(config: ModelConfig) -> list[str]:
    """Problems: paths in the config that lead out of the directory. Check them before a backend reads the model."""
    return [
        f"{what} '{path}' is not a path inside the model's directory"
        for what, path in _named_files(config)
        if path and not is_inside(path)
    ]


def _named_files(config: ModelConfig) -> Iterator[tuple[str, str]]:
    yield "default_model_filename", config.default_model_filename
    for capability, path in config.cc_model_filenames.items():
        yield f"cc_model_filenames of '{capability}'", path
    for output in config.output:
        yield f"label_filename of output '{output.name}'", output.label_filename
    for state in config.sequence_batching.state:
        for initial in state.initial_state:
            yield f"data_file of initial state '{initial.name}'", initial.data_file
    for sample in config.model_warmup:
        for name, given in sample.inputs.items():
            yield f"input_data_file of model_warmup '{sample.name}', input '{name}'", given.input_data_file


def read_inside(model_dir: Path, relative: str) -> bytes:
    """The content of a data file, which must not be a link that leads out of `model_dir`. Raises `OSError`.

    Model files are often links to a store of weights, made by the repository's owner. They are not part of an answer;
    labels and initial states are.
    """
    path = (model_dir / relative).resolve()
    if not path.is_relative_to(model_dir.resolve()):
        raise OSError(0, "it is a link that leads out of the model's directory")
    return path.read_bytes()
