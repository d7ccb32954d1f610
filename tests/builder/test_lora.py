"""An engine with an adapter merged into it computes what PEFT's model computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.engine.cpu.runner import CpuRunner
from llmserve.engine.directory.artifact import EngineDirectory
from tests.adapters import adapted_model, make_adapter, save_adapter
from tests.checkpoints import make_checkpoint
from tests.engine.cpu.networks import all_logits
from tests.gguf_files import make_gguf
from tests.oracle import oracle_logits, relative_error

IDS = [1, 70, 35, 190, 17, 101, 44, 17, 260, 9]
ATTENTION = ["q_proj", "v_proj", "o_proj"]
OPTIONS = BuildOptions(dtype="float32", max_seq_len=64, max_num_tokens=64, max_batch_size=4)


def logits_of(engine: Path) -> NDArray[np.float32]:
    runner = CpuRunner.open(EngineDirectory.open(engine).engine_file, num_blocks=8, threads=1)
    try:
        return all_logits(runner, IDS)
    finally:
        runner.close()


@pytest.mark.parametrize(("quantization", "bound"), [("", 1e-5), ("int8", 6e-2)])
@pytest.mark.parametrize("make", [make_checkpoint, None], ids=["a folder", "a GGUF file"])
def test_the_engine_computes_what_peft_computes(
    make: Callable[..., Path] | None, quantization: str, bound: float, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path / "c", "llama")
    source = folder if make else make_gguf(tmp_path / "m.gguf", "llama")
    model = adapted_model(folder, target_modules=ATTENTION, modules_to_save=["lm_head"])
    save_adapter(model, tmp_path / "a")
    options = replace(OPTIONS, quantization=quantization, lora=str(tmp_path / "a"))
    manifest = build_engine(source, tmp_path / "e", options)
    assert relative_error(logits_of(tmp_path / "e"), oracle_logits(model, IDS)) < bound
    assert manifest.source.files[-2:] == ("adapter_config.json", "adapter_model.safetensors")
    assert str(tmp_path) not in manifest.to_json()


def test_blocks_of_a_gguf_file_are_kept_where_the_adapter_changes_nothing(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "c", "llama", hidden_size=256, intermediate_size=512)
    file = make_gguf(tmp_path / "m.gguf", "llama", stored="Q4_0", hidden_size=256, intermediate_size=512)
    make_adapter(tmp_path / "a", folder, target_modules=["q_proj"])
    kept = replace(OPTIONS, quantization="gguf")
    plain, merged = (
        build_engine(file, tmp_path / name, replace(kept, lora=lora))
        for name, lora in (("p", ""), ("m", str(tmp_path / "a")))
    )
    size_of = {name: (tmp_path / name / "rank0.engine").stat().st_size for name in "pm"}
    assert plain.engine_digest != merged.engine_digest
    assert size_of["p"] < size_of["m"] < 2 * size_of["p"], "rows of queries alone become floats"


def test_the_same_adapter_gives_the_same_engine_wherever_it_lies(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "c", "llama")
    digests = set()
    for name in ("a", "b"):
        make_adapter(tmp_path / name, folder)
        manifest = build_engine(folder, tmp_path / "e", replace(OPTIONS, lora=str(tmp_path / name)))
        digests.add((manifest.engine_digest, manifest.source.digest))
    plain = build_engine(folder, tmp_path / "e", OPTIONS)
    assert len(digests) == 1
    assert (plain.engine_digest, plain.source.digest) not in digests
