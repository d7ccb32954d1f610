"""A CUDA engine directory from build to tokens, on the fake device; and what is said where one cannot run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.builder.targets.cuda.compiler import Compiled
from llmserve.builder.targets.cuda.target import CudaTarget
from llmserve.core import GenerateRequest, SamplingParams
from llmserve.engine.base import Engine
from llmserve.engine.cuda.bindings import NvidiaDevice
from llmserve.engine.cuda.device import Graph
from llmserve.engine.cuda.layout import FORMAT_VERSION, PREFIX, Kernel, read_header
from llmserve.engine.cuda.runtime import CudaRuntime
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.registry import runtime_for
from llmserve.engine.settings import EngineSettings, GpuSettings
from llmserve.errors import EngineFileError, InvalidArgument, ResourceExhausted, Unavailable, Unsupported
from tests.checkpoints import make_checkpoint
from tests.engine.cuda.engines import SMALL_TILES
from tests.engine.cuda.fake_device import FakeCompiler, FakeDevice

LIMITS = {"dtype": "float32", "max_seq_len": 24, "max_num_tokens": 16, "max_batch_size": 4, "tokens_per_block": 4}
PROMPT = (5, 9, 11, 3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "c", "qwen2", dtype="bfloat16")


@pytest.fixture(scope="module")
def directory(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineDirectory:
    output = tmp_path_factory.mktemp("engines") / "cuda"
    options = BuildOptions(target="cuda", given={"gpu": "sm_90,sm_80"}, **LIMITS)  # type: ignore[arg-type]
    build_engine(checkpoint, output, options, target=CudaTarget(FakeCompiler(), SMALL_TILES))
    return EngineDirectory.open(output)


@pytest.fixture
def devices() -> list[FakeDevice]:
    """Those that have been opened."""
    return []


@pytest.fixture
def runtime(devices: list[FakeDevice]) -> Iterator[CudaRuntime]:
    def open_device(ordinal: int) -> FakeDevice:
        devices.append(FakeDevice(ordinal=ordinal))
        return devices[-1]

    yield CudaRuntime(open_device)
    assert all(not device.is_open for device in devices), "a device was not given back"


async def tokens(engine: Engine, **sampling: float) -> list[int]:
    request = GenerateRequest("r", PROMPT, SamplingParams(max_tokens=6, **sampling))  # type: ignore[arg-type]
    return [token async for event in engine.submit(request) for token in event.token_ids]


def test_its_self_test_passes_and_the_manifest_says_what_it_is(
    directory: EngineDirectory, runtime: CudaRuntime
) -> None:
    result = runtime.selftest(directory)
    assert result is not None
    assert result.passed, str(result)
    device = directory.manifest.device
    assert device["architectures"] == ["sm_90", "sm_80"]
    assert device["compiler"] == "interpreter"
    assert device["kernels"]["attention.attention"] >= 1
    assert runtime.built_for(directory.manifest) == "sm_90, sm_80"
    assert runtime.problems_here(directory) == []


async def test_it_answers_as_the_cpu_engine_of_the_same_checkpoint(
    directory: EngineDirectory, runtime: CudaRuntime, checkpoint: Path, tmp_path: Path, devices: list[FakeDevice]
) -> None:
    """In float32 the last bits of logits differ; the tokens of this network do not."""
    build_engine(checkpoint, tmp_path / "cpu", BuildOptions(**LIMITS))  # type: ignore[arg-type]
    other = EngineDirectory.open(tmp_path / "cpu")
    with (
        closing(runtime_for("cpu").open(other, EngineSettings(threads=1))) as cpu,
        closing(runtime.open(directory, EngineSettings(threads=1))) as cuda,
    ):
        assert cuda.info.kernels == "sm_90"
        for sampling in ({}, {"temperature": 1.3, "seed": 11}):
            assert await tokens(cuda, **sampling) == await tokens(cpu, **sampling)


def test_two_builds_have_the_same_bytes(checkpoint: Path, directory: EngineDirectory, tmp_path: Path) -> None:
    options = BuildOptions(target="cuda", given={"gpu": "sm_90,sm_80"}, **LIMITS)  # type: ignore[arg-type]
    build_engine(checkpoint, tmp_path / "again", options, target=CudaTarget(FakeCompiler(), SMALL_TILES))
    assert (tmp_path / "again/rank0.engine").read_bytes() == directory.engine_file.read_bytes()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_an_engine_of_integers_passes_its_self_test(
    quantization: str, checkpoint: Path, runtime: CudaRuntime, tmp_path: Path
) -> None:
    limits = {**LIMITS, "dtype": "float16"}
    given = {"gpu": "sm_90"}
    options = BuildOptions(target="cuda", given=given, quantization=quantization, **limits)  # type: ignore[arg-type]
    manifest = build_engine(checkpoint, tmp_path / "e", options, target=CudaTarget(FakeCompiler(), SMALL_TILES))
    assert manifest.device["quantized_params"] > 4
    result = runtime.selftest(EngineDirectory.open(tmp_path / "e"))
    assert result is not None
    assert result.passed, str(result)


def test_other_kernels_are_another_engine(checkpoint: Path, directory: EngineDirectory, tmp_path: Path) -> None:
    """A compiler of another version may compute other bits: what was proved of the one is not of the other."""

    class OtherCompiler(FakeCompiler):
        def compile(self, kernels: Sequence[Kernel], architecture: str, threads: int) -> Iterator[Compiled]:
            for each in super().compile(kernels, architecture, threads):
                yield replace(each, binary=each.binary + b" ")

    options = BuildOptions(target="cuda", given={"gpu": "sm_90,sm_80"}, **LIMITS)  # type: ignore[arg-type]
    digests = [
        build_engine(
            checkpoint, tmp_path / str(number), options, target=CudaTarget(compiler, SMALL_TILES)
        ).engine_digest
        for number, compiler in enumerate((FakeCompiler(), OtherCompiler()))
    ]
    assert digests[0] == directory.manifest.engine_digest
    assert digests[0] != digests[1]


def test_the_gpu_is_the_first_that_the_parameter_names(
    directory: EngineDirectory, runtime: CudaRuntime, devices: list[FakeDevice]
) -> None:
    runtime.open(directory, EngineSettings(gpu=GpuSettings(gpu_device_ids=(3, 1)))).close()
    assert [device.ordinal for device in devices] == [3]


def test_memory_of_the_gpu_is_told(directory: EngineDirectory, runtime: CudaRuntime, devices: list[FakeDevice]) -> None:
    with closing(runtime.open(directory, EngineSettings())) as engine:
        stats, (device,) = engine.stats(), devices
        assert stats.gpu_mem_usage == device.used_bytes
        assert 0 < stats.pinned_mem_usage < stats.gpu_mem_usage


def test_a_setting_without_effect_is_reported(
    directory: EngineDirectory, runtime: CudaRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    settings = EngineSettings(gpu=GpuSettings(gpu_device_ids=(0,), cuda_graph_mode=False, enable_chunked_context=True))
    runtime.open(directory, settings).close()
    assert [record.message for record in caplog.records if "no effect" in record.message] == [
        "parameter cuda_graph_mode = false has no effect on this engine"
    ]


def test_a_machine_without_a_driver_is_told_so(directory: EngineDirectory) -> None:
    with pytest.raises(Unsupported, match="an NVIDIA GPU is required, but this machine has no NVIDIA driver"):
        NvidiaDevice()
    (problem,) = CudaRuntime().problems_here(directory)
    assert "no NVIDIA driver" in problem


@pytest.mark.parametrize(
    ("device", "failure", "message"),
    [
        (FakeDevice("sm_86"), Unsupported, r"built for sm_80, sm_90, but this GPU is sm_86 \(Interpreter\); build it "
         "again with --gpu sm_80,sm_90,sm_86"),
        (FakeDevice(total_bytes=1000), ResourceExhausted, "room for one sequence of 24 tokens"),
    ],
)  # fmt: skip
def test_a_gpu_that_does_not_do_says_why(
    device: FakeDevice, failure: type[Exception], message: str, directory: EngineDirectory
) -> None:
    with pytest.raises(failure, match=message):
        CudaRuntime(lambda ordinal: device).open(directory, EngineSettings())
    assert not device.is_open


async def test_several_gpus_each_have_the_engine_and_share_the_requests(
    directory: EngineDirectory, devices: list[FakeDevice], runtime: CudaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is lost takes its own streams along; the other answers whoever comes next."""
    ran: list[FakeDevice] = []
    run = FakeDevice.run

    def recorded(device: FakeDevice, graph: Graph) -> None:
        if device is devices[0] and ran.count(device) == 4:
            raise Unavailable("cuGraphLaunch failed: CUDA_ERROR_LAUNCH_FAILED")
        ran.append(device)
        run(device, graph)

    monkeypatch.setattr(FakeDevice, "run", recorded)
    with closing(runtime.open(directory, EngineSettings(gpu=GpuSettings(instance_gpus=(2, 0))))) as engine:
        assert [device.ordinal for device in devices] == [2, 0]
        first, second = await asyncio.gather(tokens(engine), tokens(engine), return_exceptions=True)
        assert isinstance(first, Unavailable)
        assert set(ran) == set(devices)
        assert engine.healthy()
        assert await tokens(engine) == second


def test_a_gpu_among_several_that_does_not_do_is_named(directory: EngineDirectory) -> None:
    opened = {3: FakeDevice(), 1: FakeDevice("sm_86")}
    settings = EngineSettings(gpu=GpuSettings(instance_gpus=(3, 1)))
    with pytest.raises(Unsupported, match=r"^GPU 1, .* built for sm_80, sm_90, but this GPU is sm_86"):
        CudaRuntime(lambda ordinal: opened[ordinal]).open(directory, settings)
    assert not any(device.is_open for device in opened.values())


def test_two_choices_of_gpus_must_be_the_same(directory: EngineDirectory, runtime: CudaRuntime) -> None:
    settings = EngineSettings(gpu=GpuSettings(gpu_device_ids=(0,), instance_gpus=(0, 1)))
    with pytest.raises(InvalidArgument, match=r"gpu_device_ids \(0\) and instance_group's gpus \(0, 1\)"):
        runtime.open(directory, settings)


async def test_a_gpu_that_is_lost_ends_its_streams_and_the_engine_is_not_healthy(
    directory: EngineDirectory, devices: list[FakeDevice], monkeypatch: pytest.MonkeyPatch, runtime: CudaRuntime
) -> None:
    with closing(runtime.open(directory, EngineSettings())) as engine:
        run, left = FakeDevice.run, [4]

        def falls_off_the_bus(device: FakeDevice, graph: Graph) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Unavailable("cuGraphLaunch failed: CUDA_ERROR_LAUNCH_FAILED")
            run(device, graph)

        monkeypatch.setattr(FakeDevice, "run", falls_off_the_bus)
        with pytest.raises(Unavailable, match="CUDA_ERROR_LAUNCH_FAILED"):
            await tokens(engine)
        assert not engine.healthy()
        with pytest.raises(Unavailable):
            await tokens(engine)


def damaged(content: bytes, kind: str) -> bytes:
    magic, version, num_bytes, checksum = PREFIX.unpack(content[: PREFIX.size])
    text = content[PREFIX.size : PREFIX.size + num_bytes]
    return {
        "too short": content[:10],
        "not an engine file for CUDA": b"LLMSENG\n" + content[8:],
        f"format version {FORMAT_VERSION + 1}": PREFIX.pack(magic, version + 1, num_bytes, checksum) + text,
        "truncated or damaged": content[:-1],
        "longer than the file": PREFIX.pack(magic, version, 1 << 40, checksum) + text,
        "checksum": content[: PREFIX.size + 5] + b"?" + content[PREFIX.size + 6 :],
    }[kind]


@pytest.mark.parametrize(
    "kind",
    ["too short", "not an engine file for CUDA", f"format version {FORMAT_VERSION + 1}", "truncated or damaged",
     "longer than the file", "checksum"],
)  # fmt: skip
def test_a_damaged_file_is_refused_by_name(kind: str, directory: EngineDirectory, tmp_path: Path) -> None:
    file = tmp_path / "rank0.engine"
    file.write_bytes(damaged(directory.engine_file.read_bytes(), kind))
    with pytest.raises(EngineFileError, match=kind):
        read_header(file)


@pytest.mark.parametrize("change", [{"kernels": 3}, {"launches": [[0]]}, {"more": 1}, {"tensors": None}])
def test_a_header_that_makes_no_sense_is_refused(change: object, directory: EngineDirectory, tmp_path: Path) -> None:
    import zlib

    content = directory.engine_file.read_bytes()
    magic, version, num_bytes, _ = PREFIX.unpack(content[: PREFIX.size])
    fields = json.loads(content[PREFIX.size : PREFIX.size + num_bytes])
    text = json.dumps({**fields, **change}).encode()  # type: ignore[dict-item]
    file = tmp_path / "rank0.engine"
    file.write_bytes(PREFIX.pack(magic, version, len(text), zlib.crc32(text)) + text)
    with pytest.raises(EngineFileError, match="cannot be read"):
        read_header(file)


def test_a_binary_that_does_not_load_is_an_error_of_the_file(
    directory: EngineDirectory, tmp_path: Path, devices: list[FakeDevice], runtime: CudaRuntime
) -> None:
    header = read_header(directory.engine_file)
    place = header.data_begin + header.binaries["sm_90"][0].offset
    with directory.engine_file.open("rb+") as file:
        file.seek(place)
        kept = file.read(4)
        file.seek(place)
        file.write(b"\0\0\0\0")
    try:
        with pytest.raises(EngineFileError, match="cannot be loaded"):
            runtime.open(directory, EngineSettings())
    finally:
        with directory.engine_file.open("rb+") as file:
            file.seek(place)
            file.write(kept)
