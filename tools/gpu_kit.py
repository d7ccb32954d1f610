"""Puts everything that a check of CUDA engines needs on a machine without a network into one folder: `make gpu-kit`.

It does not need a GPU. Kernels are compiled here, for the networks that `tools.check_gpu --target cuda --kit FOLDER`
builds. The kit also has the CPU library, which chooses tokens, and packages that a machine with PyTorch may lack.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from llmserve.builder.build import build_kernels
from llmserve.builder.options import BuildOptions
from llmserve.engine.native import library
from tests.checkpoints import make_checkpoint
from tools.benchmark.hybrids import HYBRIDS
from tools.benchmark.ours_cuda import build_options
from tools.benchmark.shapes import SHAPES
from tools.gpu_check.__main__ import METADATA
from tools.gpu_check.checks import CHECKPOINT, CONTRACT_NETWORK, ROOT, kernel_file
from tools.gpu_check.speed_of_networks import LAYER_PRECISIONS, LAYERS

MOST_BYTES = 30 << 20  # the repository has the same size again
# Imported by `llmserve serve`, `eval` and the contract's tests, but not in every image with PyTorch and transformers.
PACKAGES = (
    "annotated-doc", "annotated-types", "datasets", "dill", "fastapi", "grpcio", "hpack", "httptools", "jsonschema",
    "jsonschema-specifications", "llguidance", "multiprocess", "nltk", "opentelemetry-api", "protobuf",
    "pydantic", "pydantic-core", "pytest-asyncio", "python-rapidjson", "referencing", "rpds-py", "rouge-score",
    "starlette", "tritonclient", "typing-inspection",
)  # fmt: skip
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 27, 28, 31, 34)), "manylinux2014_x86_64",
             "manylinux1_x86_64")  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu-kit", description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "gpu-kit", help="folder, made anew")
    parser.add_argument("--gpu", default="sm_90", help="architectures, as for llmserve build")
    parser.add_argument(
        "--python", default="3.12", help="version of Python on the GPU's machine; its processor is x86-64"
    )
    parser.add_argument("--only-kernels", action="store_true", help="keep the packages of the folder")
    given = parser.parse_args(arguments)
    if not given.only_kernels:
        shutil.rmtree(given.output, ignore_errors=True)
        add_wheels(given.output / "wheels", given.python)
    given.output.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(library.__file__).with_name(library.LIBRARY_NAME), given.output)
    (given.output / METADATA).write_text(metadata.distribution("llmserve").read_text(METADATA) or "")
    add_kernels(given.output, given.gpu)
    size = sum(path.stat().st_size for path in given.output.rglob("*") if path.is_file())
    print(f"{given.output}: {size / (1 << 20):.0f} MB")
    if size > MOST_BYTES:
        print(f"more than {MOST_BYTES >> 20} MB", file=sys.stderr)
        return 1
    return 0


def add_wheels(folder: Path, python: str) -> None:
    """Adds wheels of the versions that are installed here."""
    wanted = {name: f"{name}=={metadata.version(name)}" for name in PACKAGES}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    source = wanted.pop("rouge-score")  # published as source only, and pure Python
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), source], check=True)
    for_python = ["--python-version", python, "--implementation", "cp", "--only-binary=:all:"]
    for_python += [f"--platform={name}" for name in PLATFORMS]
    subprocess.run([*pip, "download", "--no-deps", "--dest", str(folder), *for_python, *wanted.values()], check=True)


def add_kernels(kit: Path, gpu: str) -> None:
    with TemporaryDirectory() as folder:
        contract = Path(folder) / "contract"
        make_checkpoint(contract, "llama", **CONTRACT_NETWORK)
        networks = [("demo", CHECKPOINT, BuildOptions(target="cuda", dtype="float16"))]
        networks += [("contract", contract, BuildOptions(target="cuda"))]
        small = [(f"{LAYERS}-{precision}", SHAPES[LAYERS].config(), precision) for precision in LAYER_PRECISIONS]
        small += [(f"states-{name}", hybrid.config(), "float16") for name, hybrid in HYBRIDS.items()]
        for name, config, precision in small:
            path = Path(folder) / name
            path.mkdir()
            (path / "config.json").write_text(json.dumps(config))
            networks.append((name, path, build_options(precision)))
        for name, checkpoint, options in networks:
            path = kernel_file(kit, name)
            path.parent.mkdir(exist_ok=True)
            found = build_kernels(checkpoint, path, replace(options, given={"gpu": gpu}))
            print(f"{name}: {found}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
