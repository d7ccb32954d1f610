"""An adapter directory holds what PEFT's folder computes; what does not fit an engine is refused, all at once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from llmserve.builder.adapter import build_adapter
from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.engine.adapters.sealed import SealedAdapter, seal_adapter
from llmserve.engine.cpu.runner import CpuRunner
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.directory.factors import Factors
from llmserve.engine.directory.verify import verify_adapter
from llmserve.errors import AlreadyExists, EngineFileError, LlmserveError, NotFound
from llmserve.scheduler.plan import StepPlan
from tests.adapters import USUAL_MODULES, adapted_model, make_adapter, save_adapter
from tests.checkpoints import make_checkpoint
from tests.engine.cpu.networks import all_logits, prefill
from tests.oracle import oracle_logits

IDS = [1, 70, 35, 190, 17, 101, 44, 17, 260, 9]
OPTIONS = BuildOptions(dtype="float32", max_seq_len=64, max_num_tokens=64, max_batch_size=4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint `c`, its engine `e` and an adapter `a`."""
    path = tmp_path_factory.mktemp("adapter")
    make_checkpoint(path / "c", "llama")
    build_engine(path / "c", path / "e", OPTIONS)
    make_adapter(path / "a", path / "c")
    return path


@contextmanager
def runner_over(engine: Path) -> Iterator[CpuRunner]:
    runner = CpuRunner.open(EngineDirectory.open(engine).engine_file, num_blocks=8, threads=1)
    yield runner
    runner.close()


def test_the_digest_is_of_base_and_numbers(folders: Path, tmp_path: Path) -> None:
    first, again = (build_adapter(folders / "a", folders / "e", tmp_path / name) for name in ("1", "2"))
    assert first == again
    names = {"adapter.json", "weights.bin", "adapter_config.json", "selftest.npz"}
    assert {path.name for path in (tmp_path / "1").iterdir()} == names
    make_adapter(tmp_path / "b", folders / "c", seed=1)
    assert build_adapter(tmp_path / "b", folders / "e", tmp_path / "1").adapter_digest != first.adapter_digest
    build_engine(folders / "c", tmp_path / "e", replace(OPTIONS, max_batch_size=5))
    assert build_adapter(folders / "a", tmp_path / "e", tmp_path / "3").adapter_digest != first.adapter_digest


def test_the_self_test_finds_what_computes_something_else(folders: Path, tmp_path: Path) -> None:
    """The numbers of one matrix change, and everything is sealed again."""
    build_adapter(folders / "a", folders / "e", tmp_path / "s")
    adapter, engine = SealedAdapter.open(tmp_path / "s"), EngineDirectory.open(folders / "e")
    assert "self-test passed" in str(verify_adapter(adapter, engine))
    parts, manifest = adapter.read(), adapter.manifest
    changed = [replace(parts[0], up=parts[0].up * np.float32(1.01)), *parts[1:]]
    config = (adapter.path / "adapter_config.json").read_bytes()
    wrong = seal_adapter(adapter.path, changed, base_digest=manifest.base_digest, source_digest="", config=config)
    found = verify_adapter(
        SealedAdapter(adapter.path, replace(wrong, selftest_sha256=manifest.selftest_sha256)), engine
    )
    assert "self-test FAILED" in str(found)
    assert verify_adapter(SealedAdapter(adapter.path, wrong), engine) is None, "as older ones are, without"
    with pytest.raises(EngineFileError, match="was built for the engine"):
        verify_adapter(SealedAdapter(adapter.path, replace(wrong, base_digest="f" * 64)), engine)


def test_nothing_else_is_replaced(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x/y").touch()
    with pytest.raises(AlreadyExists, match="not an adapter directory"):
        build_adapter(folders / "a", folders / "e", tmp_path / "x")
    with pytest.raises(AlreadyExists, match="not an adapter directory"):
        build_adapter(folders / "a", folders / "e", folders / "e")


def refused(folders: Path, adapter: Path, engine: Path | None = None) -> str:
    with pytest.raises(LlmserveError) as caught:
        build_adapter(adapter, engine or folders / "e", folders / "never")
    assert not (folders / "never").exists()
    return str(caught.value)


def test_what_is_not_for_run_time_is_refused_all_at_once(folders: Path, tmp_path: Path) -> None:
    modules = ["q_proj", "embed_tokens", "lm_head"]
    make_adapter(tmp_path / "a", folders / "c", target_modules=modules, modules_to_save=["input_layernorm"], r=4)
    said = refused(folders, tmp_path / "a")
    assert "it replaces all of model.layers.0.input_layernorm.weight" in said
    assert "it changes model.embed_tokens.weight, an embedding" in said
    assert "it changes lm_head.weight, the head" in said
    assert "llmserve build CHECKPOINT --lora ADAPTER" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [({"use_dora": True}, "is changed by DoRA"), ({"r": 257}, "has rank 257; at run time, at most 256 is supported")],
)
def test_an_option_that_no_engine_has_at_run_time(
    options: dict[str, object], words: str, folders: Path, tmp_path: Path
) -> None:
    make_adapter(tmp_path / "a", folders / "c", **{"target_modules": ["o_proj"], **options})
    assert words in refused(folders, tmp_path / "a")


def test_an_adapter_of_another_network(folders: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "o", "llama", num_hidden_layers=3, hidden_size=96)
    make_adapter(tmp_path / "a", other)
    said = refused(folders, tmp_path / "a")
    assert "it changes model.layers.2.mlp.up_proj.weight, but the engine has no such matrix" in said
    assert "q_proj.weight has the shape [64, 64] in the engine, but [96, 96] in the adapter" in said


def test_experts_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "c", "mixtral")
    build_engine(folder, tmp_path / "e", OPTIONS)
    weights = {
        f"base_model.model.model.layers.0.block_sparse_moe.experts.0.w1.lora_{side}.weight": np.ones(shape, np.float32)
        for side, shape in (("A", (4, 64)), ("B", (176, 4)))
    }
    (tmp_path / "a").mkdir()
    save_file(weights, tmp_path / "a/adapter_model.safetensors")
    (tmp_path / "a/adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    assert "w1.weight, a matrix of experts" in refused(tmp_path, tmp_path / "a")


ROUNDED = {
    "int8": replace(OPTIONS, quantization="int8"),
    "int8 and float16": replace(OPTIONS, quantization="int8", dtype="float16"),
    "int4": replace(OPTIONS, quantization="int4"),
    "an int8 cache": replace(OPTIONS, kv_cache_dtype="int8"),
}


@pytest.mark.parametrize("what", ROUNDED)
@pytest.mark.parametrize("kind", ["uneven", "qwen2"])
def test_rounded_engines_compute_what_peft_computes(kind: str, what: str, tmp_path: Path) -> None:
    """As well as with the adapter merged: what was moved between their matrices is moved in its matrices, too."""
    folder = make_checkpoint(tmp_path / "c", "llama" if kind == "uneven" else kind)
    if kind == "uneven":
        make_uneven(folder)
    build_engine(folder, tmp_path / "e", ROUNDED[what])
    model = adapted_model(folder, target_modules=USUAL_MODULES, lora_alpha=1)
    save_adapter(model, tmp_path / "a")
    build_engine(folder, tmp_path / "m", replace(ROUNDED[what], lora=str(tmp_path / "a")))
    build_adapter(tmp_path / "a", tmp_path / "e", tmp_path / "s")
    factors = Factors.load(tmp_path / "e/factors.npz")
    moved = {name for sets in (factors.rows, factors.columns) for name, powers in sets.items() if (powers != 1).any()}
    assert "layers.0.attn.qkv" in moved or kind != "uneven", "factors should matter"
    wanted = oracle_logits(model, IDS)
    with runner_over(tmp_path / "m") as merged, runner_over(tmp_path / "e") as runner:
        runner.load_adapter(1, runner.packed(SealedAdapter.open(tmp_path / "s")))
        found = runner.step(StepPlan((replace(prefill(runner, IDS), adapter=1),))).logits[0]
        # The factors are the base's: what the adapter adds may fit them worse than a merged matrix fits its own.
        assert mean_error(found, wanted) < 0.02 + 4 * mean_error(all_logits(merged, IDS), wanted)
        assert mean_error(found, wanted) < 0.9 * mean_error(all_logits(runner, IDS), wanted)


def mean_error(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """Of what is rounded the largest error hangs on single integers."""
    return float(np.sqrt(np.square(found - wanted).mean() / np.square(wanted).mean()))


def make_uneven(folder: Path) -> None:
    """Channels of very different sizes, as trained networks have: norms with some large weights."""
    file = folder / "model.safetensors"
    tensors = dict(load_file(file))
    for name, tensor in tensors.items():
        if name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight")):
            tensor[::7] *= 32
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
            tensor[:, ::7] /= 32
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # pairs that turn together are eight rows apart
            tensor[::8] *= 16.0 if "k_proj" in name else 1 / 16
        if name.endswith(("v_proj.weight", "up_proj.weight")):
            tensor[::5] *= 16
        elif name.endswith("down_proj.weight"):
            tensor[:, ::5] /= 16
    save_file(tensors, file)


def test_rounded_engines_of_an_older_build_are_named(folders: Path, tmp_path: Path) -> None:
    build_engine(folders / "c", tmp_path / "e", ROUNDED["int8"])
    manifest = EngineDirectory.open(tmp_path / "e").manifest
    files = {name: record for name, record in manifest.files.items() if name != "factors.npz"}
    (tmp_path / "e/manifest.json").write_text(replace(manifest, files=files).to_json())
    said = refused(folders, folders / "a", tmp_path / "e")
    assert "has no factors.npz: an older llmserve built it; rebuild it with" in said


def test_numbers_that_do_not_fit_the_engine(folders: Path, tmp_path: Path) -> None:
    build_engine(folders / "c", tmp_path / "e", replace(OPTIONS, dtype="float16"))
    make_adapter(tmp_path / "a", folders / "c", target_modules=["o_proj"], lora_alpha=1e7)
    assert "does not fit float16 (a value overflows)" in refused(folders, tmp_path / "a", tmp_path / "e")


def edit_manifest(path: Path) -> None:
    file = path / "adapter.json"
    file.write_text(file.read_text().replace('"rank": 4', '"rank": 2'))


def seal_again(path: Path) -> None:
    """Other weights under the digest that a gate has passed."""
    weights = b"\0" * (path / "weights.bin").stat().st_size
    (path / "weights.bin").write_bytes(weights)
    manifest = SealedAdapter.open(path).manifest
    text = replace(manifest, weights_sha256=hashlib.sha256(weights).hexdigest()).to_json()
    (path / "adapter.json").write_text(text)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "edited": (edit_manifest, "was changed after the build"),
    "sealed again": (seal_again, "names a digest that is not its matrices'"),
    "no JSON": (lambda path: (path / "adapter.json").write_text("{"), "is damaged"),
    "of tomorrow": (lambda path: (path / "adapter.json").write_text('{"format_version": 9}'), "format version 9"),
    "PEFT's folder": (lambda path: (path / "adapter.json").unlink(), "is not an adapter directory"),
    "another config": (lambda path: (path / "adapter_config.json").write_text("{}"), "adapter_config.json was changed"),
    "truncated": (lambda path: (path / "weights.bin").write_bytes(b"0000"), "weights.bin was changed"),
    "without weights": (lambda path: (path / "weights.bin").unlink(), "cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_directory_is_refused(damage: str, folders: Path, tmp_path: Path) -> None:
    build_adapter(folders / "a", folders / "e", tmp_path / "s")
    change, words = DAMAGES[damage]
    change(tmp_path / "s")
    with pytest.raises(EngineFileError, match=words):
        SealedAdapter.open(tmp_path / "s").read()


def test_another_base_is_refused_by_digest(folders: Path, tmp_path: Path) -> None:
    build_adapter(folders / "a", folders / "e", tmp_path / "s")
    with pytest.raises(EngineFileError, match="was built for the engine"):
        SealedAdapter.open(tmp_path / "s").require_base("f" * 64)
    with pytest.raises(NotFound, match="no adapter directory"):
        SealedAdapter.open(tmp_path / "nowhere")


def test_pickles_are_not_read(folders: Path, tmp_path: Path) -> None:
    make_adapter(tmp_path / "a", folders / "c")
    tensors = load_file(tmp_path / "a/adapter_model.safetensors")
    assert tensors
    (tmp_path / "a/adapter_model.safetensors").rename(tmp_path / "a/adapter_model.bin")
    assert "adapter_model.bin is not supported" in refused(folders, tmp_path / "a")
