"""Kernels that are compiled apart from weights, on another machine: the same engine comes of them, or a refusal."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmserve.builder.build import build_engine, build_kernels
from llmserve.builder.options import BuildOptions
from llmserve.builder.targets.cuda.compiler import Compiled
from llmserve.builder.targets.cuda.target import CudaTarget
from llmserve.engine.cuda.layout import Kernel, read_header
from llmserve.errors import CheckpointError, InvalidArgument, LlmserveError, RecipeError, Unsupported
from tests.checkpoints import make_checkpoint
from tests.engine.cuda.engines import SMALL_TILES
from tests.engine.cuda.fake_device import FakeCompiler

LIMITS: dict[str, Any] = {"max_seq_len": 24, "max_num_tokens": 16, "max_batch_size": 4, "tokens_per_block": 4}


class NoCompiler:
    """As where Triton is not installed."""

    @property
    def version(self) -> str:
        raise Unsupported("no compiler here")

    def compile(self, kernels: Sequence[Kernel], architecture: str, threads: int) -> Iterator[Compiled]:
        raise Unsupported("no compiler here")


def options(dtype: str = "float32", gpu: str = "sm_90,sm_80", target: str = "cuda", **given: Any) -> BuildOptions:
    return BuildOptions(target=target, dtype=dtype, given={"gpu": gpu, **given}, **LIMITS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "c", "qwen2", dtype="bfloat16")


@pytest.fixture(scope="module")
def kernels(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """From the configuration alone."""
    folder = tmp_path_factory.mktemp("elsewhere")
    shutil.copy(checkpoint / "config.json", folder)
    found = build_kernels(folder, folder / "kernels.zip", options(), target=CudaTarget(FakeCompiler(), SMALL_TILES))
    assert found.endswith("kernels for sm_90, sm_80, interpreter")
    return folder / "kernels.zip"


def build(checkpoint: Path, output: Path, asked: BuildOptions) -> None:
    build_engine(checkpoint, output, asked, target=CudaTarget(NoCompiler(), SMALL_TILES))


def test_the_engine_is_that_of_a_machine_with_a_compiler(checkpoint: Path, kernels: Path, tmp_path: Path) -> None:
    build(checkpoint, tmp_path / "here", options(kernels=str(kernels)))
    manifest = build_engine(checkpoint, tmp_path / "there", options(), target=CudaTarget(FakeCompiler(), SMALL_TILES))
    here, there = (json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("here", "there"))
    assert here["engine_digest"] == there["engine_digest"] == manifest.engine_digest
    assert here["device"] == there["device"]
    assert here["options"] == there["options"]
    assert (tmp_path / "here/rank0.engine").read_bytes() == (tmp_path / "there/rank0.engine").read_bytes()


def test_one_architecture_of_several_is_enough(checkpoint: Path, kernels: Path, tmp_path: Path) -> None:
    build(checkpoint, tmp_path / "e", options(gpu="sm_80", kernels=str(kernels)))
    assert json.loads((tmp_path / "e/manifest.json").read_text())["device"]["architectures"] == ["sm_80"]


def test_those_for_longer_steps_are_enough(checkpoint: Path, tmp_path: Path) -> None:
    """Of products for more rows than a step has, an engine has no kernel."""
    longer = replace(options("float16"), max_num_tokens=256)
    build_kernels(checkpoint, tmp_path / "kernels.zip", longer, target=CudaTarget(FakeCompiler()))
    shorter = replace(options("float16", kernels=str(tmp_path / "kernels.zip")), max_num_tokens=8)
    build_engine(checkpoint, tmp_path / "e", shorter, target=CudaTarget(NoCompiler()))
    header = read_header(tmp_path / "e/rank0.engine")
    assert max(launch.least_rows for launch in header.launches) == 1
    assert min(launch.most_rows for launch in header.launches) == 8
    build_kernels(checkpoint, tmp_path / "few.zip", shorter, target=CudaTarget(FakeCompiler()))
    given = replace(longer, given={"gpu": "sm_90", "kernels": str(tmp_path / "few.zip")})
    with pytest.raises(RecipeError, match=r"lacks \d+ of \d+ kernels for sm_90 \(.*linear"):
        build_engine(checkpoint, tmp_path / "f", given, target=CudaTarget(NoCompiler()))


def test_without_them_the_compiler_is_missed(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"this machine cannot build for cuda.*no compiler here"):
        build(checkpoint, tmp_path / "e", options())


def test_kernels_for_something_else_are_refused(checkpoint: Path, kernels: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"lacks (\d+) of \1 kernels for sm_89 .* it has kernels for sm_80, sm_90"):
        build(checkpoint, tmp_path / "e", options(gpu="sm_89", kernels=str(kernels)))
    with pytest.raises(RecipeError, match=r"lacks \d+ of \d+ kernels for sm_90 \(rowwise.embed, .* \.\.\.\)"):
        build(checkpoint, tmp_path / "e", options(dtype="float16", kernels=str(kernels)))
    assert not (tmp_path / "e").exists()


def changed(kernels: Path, path: Path, name: str, content: bytes) -> None:
    with zipfile.ZipFile(kernels) as archive, zipfile.ZipFile(path, "w") as made:
        for member in archive.namelist():
            made.writestr(member, content if member == name else archive.read(member))


def test_a_file_that_is_none_or_damaged_is_refused(checkpoint: Path, kernels: Path, tmp_path: Path) -> None:
    whole, path = kernels.read_bytes(), tmp_path / "kernels.zip"

    def refusal() -> str:
        with pytest.raises(LlmserveError) as caught:
            build(checkpoint, tmp_path / "e", options(kernels=str(path)))
        assert not (tmp_path / "e").exists()
        return str(caught.value)

    assert "kernels.zip is not a kernel file, or is damaged" in refusal()  # there is none
    at = whole.index(b"sm_90/0.cubin") + 40
    for content in (b"", b"PK", whole[:-30], whole[: len(whole) // 2], whole[:at] + b"????" + whole[at + 4 :]):
        path.write_bytes(content)
        assert "is not a kernel file, or is damaged" in refusal()
    index = json.loads(zipfile.ZipFile(kernels).read("kernels.json"))
    other = {**index["kernels"][0], "constants": [["x", [1]]]}
    wrongs: list[Any] = [
        [], {}, index | {"kernels": 3}, index | {"kernels": [{}]}, index | {"kernels": [other]},
        index | {"facts": {"sm_90": [{"symbol": "x"}]}},
    ]  # fmt: skip
    for wrong in wrongs:
        changed(kernels, path, "kernels.json", json.dumps(wrong).encode())
        assert "is not a kernel file, or is damaged" in refusal()
    changed(kernels, path, "kernels.json", json.dumps(index | {"format_version": 2}).encode())
    assert "format version 2, but this llmserve reads 1" in refusal()
    changed(
        kernels, path, "kernels.json", json.dumps(index | {"facts": {"sm_90": index["facts"]["sm_90"][:3]}}).encode()
    )
    assert "kernels for sm_90" in refusal()


def test_the_same_kernels_are_the_same_bytes(checkpoint: Path, kernels: Path, tmp_path: Path) -> None:
    """With the weights beside the configuration, over a file that is there."""
    output = tmp_path / "kernels.zip"
    output.write_text("old")
    build_kernels(checkpoint, output, options(), target=CudaTarget(FakeCompiler(), SMALL_TILES))
    assert output.read_bytes() == kernels.read_bytes()
    assert list(tmp_path.iterdir()) == [output]


def test_what_cannot_be_written_or_read_is_one_message(checkpoint: Path, tmp_path: Path) -> None:
    target = CudaTarget(FakeCompiler(), SMALL_TILES)
    with pytest.raises(InvalidArgument, match=r"kernels\.zip cannot be written"):
        build_kernels(checkpoint, tmp_path / "nowhere/kernels.zip", options(), target=target)
    with pytest.raises(CheckpointError, match="does not exist"):
        build_kernels(tmp_path / "nothing", tmp_path / "kernels.zip", options(), target=target)
    too_long = BuildOptions(target="cuda", max_seq_len=1000000, given={"gpu": "sm_90"})
    with pytest.raises(RecipeError, match="max_seq_len is 1000000"):
        build_kernels(checkpoint, tmp_path / "kernels.zip", too_long, target=target)
    with pytest.raises(Unsupported, match="engines for cpu have no kernels to compile"):
        build_kernels(checkpoint, tmp_path / "kernels.zip", BuildOptions(**LIMITS))
