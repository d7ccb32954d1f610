"""What is installed, what this machine has, and whether an engine fits."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.tensorrt_llm.fits import fit_problems
from llmserve.engine.tensorrt_llm.library import BannedSequences, Mode, installed, mode_of
from llmserve.errors import Unsupported
from tests.engine.directories import CONFIG, MANIFEST, make_engine_directory, seal
from tests.fakes.gpu_machine import gpu_machine

DEVICE: dict[str, Any] = {
    "mode": "engine", "tensorrt_llm": "1.2.1", "tensorrt": "10.0.0", "gpu": "NVIDIA Fake 80GB",
    "compute_capability": "9.0", "driver": "570.00", "world_size": 1,
}  # fmt: skip


def directory(path: Path, files: dict[str, bytes] | None = None, **device: Any) -> EngineDirectory:
    make_engine_directory(path, files)
    seal(path, replace(MANIFEST, target="tensorrt_llm", device=DEVICE | device))
    return EngineDirectory.open(path)


@pytest.mark.parametrize(
    ("version", "mode"),
    [("1.2.0", Mode.ENGINE), ("1.2.1", Mode.ENGINE), ("1.3.0rc20", Mode.LLM), ("1.3.0", Mode.LLM), ("2.0", Mode.LLM)],
)
def test_the_release_decides_the_mode(version: str, mode: Mode) -> None:
    assert mode_of(version) is mode


@pytest.mark.parametrize("version", ["0.20.0", "1.1.0", "1.0.0rc4", "weird"])
def test_a_release_that_we_do_not_know_is_refused(version: str) -> None:
    with pytest.raises(Unsupported, match=r"must be 1\.2\.x, or 1\.3 or newer"):
        mode_of(version)


def test_nothing_installed_says_what_to_install() -> None:
    with pytest.raises(Unsupported, match=r"pip install 'llmserve\[tensorrt\]'"):
        installed()
    with gpu_machine("1.2"):
        assert str(installed()) == "tensorrt-llm 1.2.1, engine mode (ahead-of-time engines)"


def test_an_engine_of_this_machine_fits(tmp_path: Path) -> None:
    with gpu_machine("1.2"):
        assert fit_problems(directory(tmp_path / "e")) == []


@pytest.mark.parametrize(
    ("machine", "device", "words"),
    [
        ({"FAKE_GPU_CAPABILITY": "8.0"}, {}, "built for compute capability 9.0 .* GPU 0 is a NVIDIA Fake .* 8.0"),
        (
            {},
            {"tensorrt": "10.9.0"},
            r"compiled by TensorRT 10\.9\.0; installed is 10\.0\.0; build it again.*llmserve",
        ),
        ({}, {"tensorrt_llm": "1.2.0"}, r"built with tensorrt-llm 1\.2\.0 .* this machine has tensorrt-llm 1\.2\.1"),
        (
            {},
            {"mode": "llm", "tensorrt_llm": "1.3.0"},
            r"lacks llm_args.json.*lacks checkpoint/config.json.*\(llm mode\)",
        ),
        ({"FAKE_GPUS": "1"}, {"world_size": 2}, "for 1 GPUs, the manifest for 2.*needs 2 GPUs, .* sees 1.*--tp-size 1"),
        ({"FAKE_GPU_FREE_MIB": "0"}, {}, "the weights is 0.0 MiB, but GPU 0 .* has 0.0 MiB free; stop other programs"),
        ({"FAKE_GPUS": "0"}, {}, "none is visible"),
    ],
)
def test_one_that_does_not_says_why(
    machine: dict[str, str], device: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with gpu_machine("1.2", **machine):
        found = fit_problems(directory(tmp_path / "e", **device))
    assert re.search(words, "\n".join(found), re.DOTALL), found


def test_everything_is_reported_at_once(tmp_path: Path) -> None:
    found = fit_problems(directory(tmp_path / "e", {"rank0.engine": b"x"}))
    assert len(found) == 2
    assert "not installed" in found[0]
    assert "nvidia-smi" in found[1]


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    config = json.dumps(CONFIG | {"pretrained_config": {"vocab_size": 9, "mapping": {"world_size": 2}}}).encode()
    with gpu_machine("1.2"):
        (problem,) = fit_problems(directory(tmp_path / "e", {"config.json": config}, world_size=2))
    assert "lacks rank1.engine" in problem
    assert "llmserve build" in problem


def test_banned_sequences_take_the_last_token_away() -> None:
    import torch

    logits = torch.zeros(1, 1, 10)
    BannedSequences([(3,), (1, 2, 5), (9, 6)])(0, logits, [[4, 1, 2]], None, None)
    assert logits.isinf().nonzero()[:, -1].tolist() == [3, 5]
