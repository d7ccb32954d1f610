"""`--target cuda` on a machine without a GPU: it builds with the real compiler, and says why nothing runs here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llmserve.engine.cuda.layout import read_header
from tests.checkpoints import make_checkpoint

LIMITS = ("--max-seq-len", "64", "--max-num-tokens", "1", "--max-batch-size", "1")  # few rows want few kernels


def llmserve(*arguments: object, code: int = 0) -> str:
    """What it printed, on both streams."""
    command = [str(Path(sys.executable).with_name("llmserve")), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stdout + done.stderr
    return " ".join((done.stdout + done.stderr).split())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", "baichuan2-7b")


@pytest.fixture(scope="module")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("engines") / "cuda"
    shown = llmserve("build", checkpoint, "--target", "cuda", "--gpu", "sm_90", *LIMITS, "--output-dir", output)
    assert "has only been tested on an H200" in shown
    return output


def test_the_engine_has_real_binaries_and_names_its_compiler(engine: Path) -> None:
    manifest = json.loads((engine / "manifest.json").read_text())
    assert manifest["device"]["architectures"] == ["sm_90"]
    assert manifest["device"]["compiler"].startswith("triton 3.")
    assert manifest["options"]["cuda"] == {"gpu": "sm_90"}
    header = read_header(engine / "rank0.engine")
    content = (engine / "rank0.engine").read_bytes()
    for binary in header.binaries["sm_90"]:
        place = header.data_begin + binary.offset
        assert content[place : place + 4] == b"\x7fELF"
    assert "architectures ['sm_90']" in llmserve("inspect", engine)


def test_kernels_are_compiled_from_a_config_and_make_the_same_engine(
    checkpoint: Path, engine: Path, tmp_path: Path
) -> None:
    shutil.copy(checkpoint / "config.json", tmp_path)
    kernels, flags = tmp_path / "kernels.zip", ("--target", "cuda", "--gpu", "sm_90", *LIMITS)
    shown = llmserve("build", tmp_path, *flags, "--kernels-only", kernels)
    assert "kernels for sm_90, triton 3." in shown
    llmserve("build", checkpoint, *flags, "--kernels", kernels, "--output-dir", tmp_path / "e")
    assert (tmp_path / "e/rank0.engine").read_bytes() == (engine / "rank0.engine").read_bytes()
    both = ("--kernels-only", kernels, "--output-dir", tmp_path / "f")
    assert "writes a file, not an engine" in llmserve("build", checkpoint, *flags, *both, code=2)
    shown = llmserve("build", checkpoint, *flags, "--dtype", "bfloat16", "--kernels", kernels, "--dry-run", code=2)
    assert "lacks" in shown


def test_integers_are_built_with_the_real_compiler(checkpoint: Path, tmp_path: Path) -> None:
    """With int4 some rows have eight bits."""
    flags = ("--target", "cuda", "--gpu", "sm_80", "--quantization", "int4", "--kv-cache-dtype", "int8", *LIMITS)
    assert "KV cache in int8" in llmserve("build", checkpoint, *flags, "--dry-run")
    llmserve("build", checkpoint, *flags, "--output-dir", tmp_path / "e")
    header = read_header(tmp_path / "e/rank0.engine")
    assert {tensor.dtype for tensor in header.tensors} == {"float16", "float32", "int8", "uint8"}
    assert {"rowwise.round_rows", "attention_int8.write_cache"} <= {kernel.function for kernel in header.kernels}
    assert header.cache_dtype == "int8"
    assert "float16+int4+kv-int8" in llmserve("inspect", tmp_path / "e")
    assert json.loads((tmp_path / "e/manifest.json").read_text())["device"]["quantized_params"] > 4


def test_what_keeps_it_from_running_is_said_before_anything_is_opened(engine: Path) -> None:
    assert "an NVIDIA GPU is required, but this machine has no NVIDIA driver" in llmserve("inspect", engine)
    shown = llmserve("inspect", engine, "--verify", code=1)
    assert "every file is unchanged; the self-test cannot run here: an NVIDIA GPU is required" in shown
    shown = llmserve("run", engine, "--input-text", "a b", code=2)
    assert "an NVIDIA GPU is required, but this machine has no NVIDIA driver" in shown


def test_options_that_it_cannot_build_are_refused(checkpoint: Path) -> None:
    shown = llmserve("build", checkpoint, "--target", "cuda", code=2)
    assert "gpu: this machine has no GPU to build for; name the architectures, from sm_80" in shown
    assert "gpu sm_70 is unknown; write one of sm_80" in llmserve(
        "build", checkpoint, "--target", "cuda", "--gpu", "sm_70", code=2
    )
    assert "gpu RTX-4090 is unknown; write sm_89" in llmserve(
        "build", checkpoint, "--target", "cuda", "--gpu", "RTX-4090", code=2
    )
    assert "gpu sm_90 is for the cuda target" in llmserve("build", checkpoint, "--gpu", "sm_90", code=2)


def test_the_doctor_says_what_is_missing() -> None:
    shown = llmserve("doctor", "--target", "cuda", code=1)
    assert "NVIDIA GPU and driver" in shown
    assert "kernel compiler" in shown
    assert "triton 3." in shown
