"""The speed of a CUDA engine as `make check-cuda` measures it, on the device that interprets kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.builder.targets.cuda.target import CudaTarget
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.errors import InternalError
from tests.checkpoints import make_checkpoint as make_small
from tests.engine.cuda.engines import WIDE_TILES
from tests.engine.cuda.fake_device import FakeCompiler, FakeDevice
from tools.benchmark import ours_cuda, worker
from tools.benchmark.cells import Cell
from tools.benchmark.checkpoint import make_checkpoint
from tools.benchmark.job import Job
from tools.benchmark.peers.torch_compiled import CompiledModel
from tools.benchmark.peers.torch_eager import EagerModel
from tools.gpu_check import idle
from tools.gpu_check.bandwidth import ROUNDS, copied_bytes_per_s
from tools.gpu_check.speed_of_networks import measured

CELLS = (Cell("prefill", 1, 5, 1), Cell("decode", 2, 3, 3))


@pytest.mark.parametrize("precision", ["float16", "int8", "float16+kv-int8"])
def test_a_network_of_random_numbers_is_built_and_measured(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours_cuda, "TARGET", CudaTarget(FakeCompiler(), WIDE_TILES))
    monkeypatch.setattr(ours_cuda, "OPEN_DEVICE", FakeDevice)
    monkeypatch.setattr(ours_cuda, "MAX_NUM_TOKENS", 16)
    options = ours_cuda.build_options
    monkeypatch.setattr(
        ours_cuda, "build_options", lambda name: replace(options(name), given={"gpu": "sm_90"}, max_seq_len=64)
    )
    job = Job("tools.benchmark.ours_cuda", precision, "tiny", tmp_path, threads=1, cells=CELLS, passes=1)
    make_checkpoint(job.checkpoint, job.shape)
    ours_cuda.prepare(job)
    lines: list[dict[str, Any]] = []
    worker.measure(ours_cuda, job, lines.append)
    found = measured(lines, job, 1e9, {precision.removesuffix("+kv-int8"): 1e12})
    assert found["versions"]["gpu"] == FakeDevice.name
    prefill, decode = found["rows"]
    assert prefill["cell"] == "prefill 5"
    assert prefill["of_the_bound"] == pytest.approx(
        prefill["tokens_per_s"] * (5 * job.shape.layer_products + job.shape.head_products) / 5 / 1e12
    )
    assert decode["cell"] == "batch 2"
    (opened,) = (line for line in lines if line["kind"] == "opened")
    if precision == "float16+kv-int8":
        assert opened["kv_bytes_per_token"] == 1.25 * job.shape.kv_elements_per_token, "16 numbers have a scale"
    else:
        assert opened["kv_bytes_per_token"] == 2 * job.shape.kv_elements_per_token, "float16, whatever weights are"
    read = opened["weight_bytes"] + 2 * CELLS[1].mean_context * opened["kv_bytes_per_token"]
    assert decode["of_the_bound"] == pytest.approx(read / 1e9 / (decode["step_ms"] / 1e3))
    assert measured(lines, job, 0.0, {})["rows"][1]["of_the_bound"] is None


def test_the_peer_compiles_its_steps_once_and_answers_as_without(tmp_path: Path) -> None:
    """On the CPU, by a compiler that changes nothing: tokens of two batches, each twice, in its static caches."""
    # imported here: it imports Triton, which has to know by then that it interprets
    from torch._dynamo.testing import CompileCounter

    job = Job("tools.benchmark.peers.torch_compiled", "float32", "tiny", tmp_path, threads=0, cells=CELLS)
    make_checkpoint(job.checkpoint, job.shape)
    counter = CompileCounter()
    compiled = CompiledModel(job, "cpu", lambda forward: torch.compile(forward, backend=counter, fullgraph=True))
    eager = EagerModel(job)
    for batch in (1, 2, 1, 2):
        prompts = [list(range(3 + row, 12 + row)) for row in range(batch)]
        answers = []
        for model in (compiled, eager):
            model.prepare(batch, 16)
            answers.append([model.start(prompts), *(model.step() for _ in range(5))])
            model.release()
        assert answers[0] == answers[1]
    assert 1 <= counter.frame_count <= 2
    assert compiled.weight_bytes == eager.weight_bytes


def test_how_long_the_gpu_waits_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that were begun ahead, and the same graphs without a host between them."""
    checkpoint = make_small(tmp_path / "checkpoint", "llama", num_hidden_layers=1)
    options = BuildOptions(
        target="cuda", given={"gpu": "sm_90"}, max_seq_len=32, max_batch_size=2, max_num_tokens=16, tokens_per_block=8
    )
    build_engine(checkpoint, tmp_path / "engine", options, target=CudaTarget(FakeCompiler(), WIDE_TILES))
    monkeypatch.setattr(idle, "PROMPT_TOKENS", 3)
    monkeypatch.setattr(idle, "NEW_TOKENS", 5)
    monkeypatch.setattr(idle, "WARM_TOKENS", 2)
    monkeypatch.setattr(idle, "REPLAYS", 2)
    device = FakeDevice()
    (row,) = idle.measure(EngineDirectory.open(tmp_path / "engine"), [2, 64], lambda: device)
    assert row["batch"] == 2
    assert row["idle_share"] == pytest.approx(max(0.0, 1 - row["device_ms"] / row["engine_ms"]))
    assert 0 < row["device_ms"] < 10 * row["engine_ms"]
    assert not device.is_open


class Driver:
    """Notes what is copied."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: int) -> tuple[int, ...]:
            self.calls.append((name, arguments))
            return (2,) if name == "cuMemFree" else (0, len(self.calls))

        return call


def test_the_copy_counts_what_is_read_and_written_and_waits_for_it() -> None:
    driver = Driver()
    with pytest.raises(InternalError, match="cuMemFree failed: 2"):
        copied_bytes_per_s(driver, 1000)
    names = [name for name, _ in driver.calls]
    assert names.count("cuMemcpyDtoD") == ROUNDS + 1
    assert names[-2:] == ["cuCtxSynchronize", "cuMemFree"]
    copied = {arguments for name, arguments in driver.calls if name == "cuMemcpyDtoD"}
    assert copied == {(6, 5, 1000)}
