"""The lowest versions that pyproject.toml allows are ones that work, and what it installs together works together."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
GENCODE = re.compile(r"ValidateProtobufRuntimeVersion\(\s*[\w.]+,\s*(\d+),\s*(\d+),\s*(\d+)")


def floors(requirements: list[str]) -> dict[str, tuple[int, ...]]:
    found = (re.match(r"([\w.-]+)(?:\[.*\])?>=([\d.]+)(?:,<[\d.]+)?$", requirement) for requirement in requirements)
    return {match[1]: version(match[2]) for match in found if match}


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


FLOORS = floors(PROJECT["dependencies"])
MOST_BYTES = 300_000_000  # of an installation for the CPU; `make wheels` measures a fresh one


def installed_with(requirements: list[str]) -> set[str]:
    """The distributions that pip installs for them, by name."""
    found: set[tuple[str, frozenset[str]]] = set()
    wanted = [Requirement(text) for text in requirements]
    while wanted:
        requirement = wanted.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in found:
            continue
        found.add((name, extras))
        for text in metadata.requires(name) or ():
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras | {""}):
                wanted.append(needed)
    return {name for name, _ in found}


def test_every_dependency_has_a_floor() -> None:
    assert len(FLOORS) == len(PROJECT["dependencies"])


@pytest.mark.parametrize("module", [service_pb2, model_config_pb2])
def test_protobuf_is_no_older_than_the_code_generated_for_it(module: object) -> None:
    """An older runtime refuses the code at import, and tritonclient's own metadata would allow it."""
    match = GENCODE.search(inspect.getsource(module))  # type: ignore[arg-type]
    assert match is not None
    assert FLOORS["protobuf"] >= tuple(int(part) for part in match.groups())


def test_grpcio_is_no_older_than_the_code_generated_for_it() -> None:
    assert FLOORS["grpcio"] >= version(service_pb2_grpc.GRPC_GENERATED_VERSION)


def test_tritonclient_has_the_fields_that_we_read() -> None:
    assert "max_inflight_requests" in model_config_pb2.ModelEnsembling.DESCRIPTOR.fields_by_name
    assert hasattr(FieldDescriptor, "is_repeated")
    assert FLOORS["tritonclient"] >= (2, 73)  # the oldest release that the suite has passed with
    assert floors(PROJECT["optional-dependencies"]["test"])["tritonclient"] == FLOORS["tritonclient"]


def test_nothing_that_is_installed_misses_what_it_requires() -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_no_generated_code_asks_for_another_protobuf() -> None:
    """It is refused when it is imported; sentencepiece's by transformers, when it reads a `tokenizer.model`."""
    generated = [
        (Path(str(file.locate())), match)
        for distribution in metadata.distributions()
        for file in distribution.files or ()
        if file.name.endswith("_pb2.py") and (match := GENCODE.search(file.read_text()))
    ]
    installed = version(metadata.version("protobuf"))
    newer = [str(path) for path, match in generated if tuple(int(part) for part in match.groups()) > installed]
    assert len(generated) > 5
    assert newer == []


def test_what_is_installed_together_is_imported_together() -> None:
    """In one process, as the tests do: generated code of protobuf refuses a runtime that another package brought."""
    extras = PROJECT["optional-dependencies"]
    wanted = [
        *PROJECT["dependencies"],
        *(name for extra in ("eval", "baseline", "onnx", "s3", "otel", "test") for name in extras[extra]),
    ]
    names = {re.split(r"[\[=<>]", requirement)[0].replace("-", "_").lower() for requirement in wanted} - {"llmserve"}
    modules = sorted(
        module
        for module, distributions in metadata.packages_distributions().items()
        if names & {name.replace("-", "_").lower() for name in distributions}
        and module.isidentifier()
        and module[0] != "_"
    )
    assert {"tritonclient", "onnx", "torch", "transformers", "datasets"} <= set(modules)
    inside = [
        "tritonclient.grpc", "tritonclient.http", "sentencepiece.sentencepiece_model_pb2",
        "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    ]  # fmt: skip
    lines = [f"import {module}" for module in [*modules, *inside]]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, timeout=200)


def test_an_installation_for_the_cpu_is_small_and_brings_no_framework() -> None:
    names = installed_with(PROJECT["dependencies"])
    assert {"numpy", "grpcio", "tokenizers"} <= names
    assert names & {"torch", "transformers", "onnxruntime", "datasets", "pandas", "scipy", "boto3"} == set()
    files = [Path(str(file.locate())) for name in names for file in metadata.files(name) or ()]
    assert sum(path.stat().st_size for path in files if path.is_file()) < MOST_BYTES
