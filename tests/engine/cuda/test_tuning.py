"""Which tiles products are cut in is measured where they run, and changes no bit."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.builder.targets.cuda.target import CudaTarget
from llmserve.builder.targets.cuda.tiles import MANY, ProductTile, Tiles, by_rows
from llmserve.engine.cuda import tuning
from llmserve.engine.cuda.layout import StepPart, read_header
from llmserve.engine.cuda.runner import CudaRunner
from llmserve.engine.cuda.runtime import CudaRuntime
from llmserve.engine.cuda.tactics import chosen, machine_of, tile_of, tuned_launches
from llmserve.engine.cuda.tuning import time_tactics
from llmserve.engine.directory.artifact import CACHE_FILE, EngineDirectory
from llmserve.engine.tactics import TacticCache
from llmserve.errors import Unsupported
from llmserve.progress import SilentProgress
from tests.checkpoints import make_checkpoint
from tests.engine.cpu.networks import all_logits, odd_network, random_ids
from tests.engine.cuda.engines import WIDE_TILES, compile_engine
from tests.engine.cuda.fake_device import FakeCompiler, FakeDevice, FakeGraph

FEW_TILES = (ProductTile(16, 128, 4, 3), ProductTile(16, 64, 4, 3))
MANY_TILES = (ProductTile(64, 128, 4, 3), ProductTile(32, 128, 4, 3), ProductTile(64, 64, 4, 3))
TILES = replace(
    WIDE_TILES, programs=4, warps=16, floats=tuple(by_rows((64, FEW_TILES), (MANY, MANY_TILES))),
    integers=tuple(by_rows((64, FEW_TILES), (MANY, (MANY_TILES[0], MANY_TILES[2])))),
)  # fmt: skip
LIMITS = {"max_seq_len": 96, "max_num_tokens": 80, "max_batch_size": 4, "tokens_per_block": 16}
FEW = {**LIMITS, "max_num_tokens": 16}


@pytest.fixture(autouse=True)
def _are_brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time."""
    monkeypatch.setattr(tuning, "TRIALS", 1)
    monkeypatch.setattr(tuning, "LEAST_LAUNCHES", 1)
    monkeypatch.setattr(tuning, "LEAST_SECONDS", 0.0)


class TimedDevice(FakeDevice):
    """A launch takes so many seconds as its tile has columns."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.tiles: set[str] = set()  # of products that have run

    def _run(self, graph: FakeGraph) -> None:
        super()._run(graph)
        for function, *_ in graph.launches:
            constants = dict(function.kernel["constants"])
            if "TILE_INPUTS" in constants:
                tile = f"{constants['TILE_ROWS']}x{constants['TILE_COLUMNS']}"
                self.tiles.add(tile)
                self.now += constants["TILE_COLUMNS"]


def options(dtype: str = "float32", quantization: str = "") -> BuildOptions:
    given: dict[str, Any] = {"dtype": dtype, "quantization": quantization, "target": "cuda", **LIMITS}
    return BuildOptions(given={"gpu": "sm_90"}, **given)


def tuned(path: Path, device: TimedDevice) -> TacticCache:
    with closing(CudaRunner(path, device, num_blocks=1, threads=1)) as runner:
        return time_tactics(runner, SilentProgress(), lambda: device.now)


def logits_of(path: Path, device: FakeDevice, ids: Sequence[int]) -> np.ndarray[Any, Any]:
    with closing(CudaRunner(path, device, num_blocks=16, threads=1)) as runner:
        return all_logits(runner, ids)


@pytest.mark.parametrize(("dtype", "quantization"), [("float32", ""), ("bfloat16", "int8")])
def test_the_fastest_tiles_are_used_and_no_bit_changes(dtype: str, quantization: str, tmp_path: Path) -> None:
    path = compile_engine(odd_network(layers=1), tmp_path / "rank0.engine", options(dtype, quantization), tiles=TILES)
    ids = random_ids(read_header(path).vocab_size, 70)
    device = TimedDevice()
    before = logits_of(path, device, ids)
    as_built = device.tiles
    cache = tuned(path, TimedDevice())
    cache.save(path.with_name(CACHE_FILE))
    device = TimedDevice()
    assert np.array_equal(logits_of(path, device, ids), before)
    assert as_built == {"16x128", "64x128"}
    assert device.tiles == {"16x64", "64x64"}
    header = read_header(path)
    for layer, (_, launches) in tuned_launches(header).items():
        timings = cache.timings(*layer)
        best = min(timings, key=lambda name: timings[name])
        assert len(timings) == 1 + len(header.tactics[launches[0].kernel])
        launch = chosen(header, launches[0], layer.rows, cache)
        assert timings[tile_of(header.kernels[launch.kernel])] == timings[best]


def test_timings_of_another_device_are_not_used(tmp_path: Path) -> None:
    path = compile_engine(odd_network(layers=1), tmp_path / "rank0.engine", options(), tiles=TILES)
    tuned(path, TimedDevice()).save(path.with_name(CACHE_FILE))
    device = TimedDevice()
    device.name = "Another"
    logits_of(path, device, [1, 2, 3])
    assert device.tiles == {"16x128"}


def test_a_tactic_with_other_bits_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be the fastest."""

    class Inexact(TimedDevice):
        def _run(self, graph: FakeGraph) -> None:
            super()._run(graph)
            for function, _, arguments in graph.launches:
                constants, names = dict(function.kernel["constants"]), [name for name, _ in function.kernel["types"]]
                if constants.get("TILE_COLUMNS") == 64 and "y" in names and "TILE_INPUTS" in constants:
                    self._inside(arguments[names.index("y")], 1)[0] ^= 1

    path = compile_engine(odd_network(layers=1), tmp_path / "rank0.engine", options(), tiles=TILES)
    with caplog.at_level(logging.WARNING):
        cache = tuned(path, Inexact())
    assert "in 16x64, 4 warps, 3 stages produces different bits on this device, so it is not used" in caplog.text
    whole = [layer for layer in tuned_launches(read_header(path)) if "segments" not in layer.name]
    assert whole
    assert all("16x64, 4 warps, 3 stages" not in cache.timings(*layer) for layer in whole)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "c", "qwen2", dtype="bfloat16")


def build(checkpoint: Path, output: Path, tiles: Tiles = TILES) -> EngineDirectory:
    asked = BuildOptions(target="cuda", dtype="float32", given={"gpu": "sm_90"}, **FEW)  # type: ignore[arg-type]
    build_engine(checkpoint, output, asked, target=CudaTarget(FakeCompiler(), tiles))
    return EngineDirectory.open(output)


def test_tune_leaves_its_timings_beside_the_engine(checkpoint: Path, tmp_path: Path) -> None:
    directory = build(checkpoint, tmp_path / "engine")
    devices: list[FakeDevice] = []

    def open_device(ordinal: int) -> FakeDevice:
        devices.append(FakeDevice())
        return devices[-1]

    runtime = CudaRuntime(open_device)
    layers = runtime.tactics(directory).layers
    assert {choice.reason for choices in layers.values() for choice in choices} == {
        "default, not measured on this machine"
    }
    runtime.tune(directory, SilentProgress())
    tactics = runtime.tactics(directory)
    assert tactics.about == "tactics on Interpreter, sm_90"
    assert list(tactics.layers) == list(layers)
    assert all("us" in choice.reason for choices in tactics.layers.values() for choice in choices)
    assert (directory.path / CACHE_FILE).is_file()
    assert not any(device.is_open for device in devices)


def test_an_engine_without_a_choice_says_so(checkpoint: Path, tmp_path: Path) -> None:
    directory = build(checkpoint, tmp_path / "engine", WIDE_TILES)
    assert directory.manifest.device["tactics"] == 0
    with pytest.raises(Unsupported, match="the engine was built with only one tactic for each product"):
        CudaRuntime(lambda ordinal: FakeDevice()).tune(directory, SilentProgress())


def test_every_product_of_a_real_engine_has_a_choice(tmp_path: Path) -> None:
    """Of what runs: the head never has more rows than few."""
    path = compile_engine(odd_network(layers=1), tmp_path / "rank0.engine", options(), tiles=TILES)
    header = read_header(path)
    products = [launch for launch in header.launches if "TILE_INPUTS" in dict(header.kernels[launch.kernel].constants)]
    assert products
    assert {launch.kernel for launch in products} == set(header.tactics)
    assert {launch.part for _, launches in tuned_launches(header).values() for launch in launches} == {
        StepPart.BODY.value, StepPart.HEAD.value,
    }  # fmt: skip
    assert machine_of(FakeDevice()).device == "Interpreter"
