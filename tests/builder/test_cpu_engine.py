"""Checkpoint to logits through everything real: reader, builder, CPU target, CPU runner."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmserve.builder import pieces
from llmserve.builder.build import build_engine
from llmserve.builder.loss import MOST_TOKENS
from llmserve.builder.options import BuildOptions
from llmserve.builder.plan import plan_build
from llmserve.engine.cpu.runner import CpuRunner, layout_of, read_header
from llmserve.engine.directory.artifact import CACHE_FILE, SELFTEST_FILE, EngineDirectory
from llmserve.engine.directory.manifest import Manifest
from llmserve.engine.directory.selftest import SelfTest, SelfTestResult, prompt_logits
from llmserve.engine.directory.verify import verify_engine
from llmserve.models.number_formats import FLOATS
from tests.builder.contents import TIMES, contents
from tests.checkpoints import KINDS, MIXTURES, WITH_STATES, make_checkpoint, random_tensors, write_tensors
from tests.engine.directories import seal

OPTIONS = BuildOptions(dtype="float32", max_num_tokens=16, tokens_per_block=16)


def build(path: Path, kind: str, options: BuildOptions = OPTIONS) -> EngineDirectory:
    build_engine(make_checkpoint(path / kind, kind), path / "engine", options)
    return EngineDirectory.open(path / "engine")


def verified(directory: EngineDirectory) -> SelfTestResult:
    result = verify_engine(directory)
    assert result is not None
    return result


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_architecture_computes_the_references_logits(tmp_path: Path, kind: str) -> None:
    result = verified(build(tmp_path, kind))
    assert result.passed
    assert result.max_error < 1e-4


@pytest.mark.parametrize("kind", WITH_STATES)
def test_the_plan_and_the_engine_say_how_large_a_state_is(tmp_path: Path, kind: str) -> None:
    checkpoint = make_checkpoint(tmp_path / kind, kind)
    plan = plan_build(checkpoint, OPTIONS, measure=lambda: 1e9)
    size = plan.program.state_bytes
    rows = dict(plan.rows())
    assert rows["states"].startswith(f"{size / 2**20:,.1f} MiB per sequence")
    assert plan.sequences_that_fit[256] < plan.kv_pool_tokens // 256
    directory = build(tmp_path, kind)
    assert directory.manifest.device["state_bytes"] == read_header(directory.engine_file).state_bytes == size


def test_the_plan_says_that_windows_take_less(tmp_path: Path) -> None:
    """Two of three layers read 16 tokens. Room is counted as the engine divides it."""
    checkpoint, options = make_checkpoint(tmp_path / "windows", "cohere2"), replace(OPTIONS, max_seq_len=192)
    plan = plan_build(checkpoint, options, measure=lambda: 1e9)
    build_engine(checkpoint, tmp_path / "engine", options)
    directory = EngineDirectory.open(tmp_path / "engine")
    header = read_header(directory.engine_file)
    layout = layout_of(directory.engine_file, header)
    num_blocks = -(-192 // header.block_size) + layout.windowed_layers.num_blocks_for(192, header.block_size)
    assert plan.sequence_bytes == {192: num_blocks * layout.block_bytes}
    assert plan.sequence_bytes[192] < 192 * plan.kv_bytes_per_token


@pytest.mark.parametrize("kind", ["baichuan2-7b", "baichuan2-13b", "llama-tied", "qwen3", *MIXTURES])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounded_engines_stay_well_within_the_tolerance(tmp_path: Path, kind: str, dtype: str) -> None:
    result = verified(build(tmp_path, kind, replace(OPTIONS, dtype=dtype)))
    assert result.passed
    assert result.max_error < result.tolerance / 2
    assert (result.tolerance > np.float32(FLOATS[dtype].tolerance)) == (kind in MIXTURES)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_engines_stay_within_their_own_tolerance(tmp_path: Path, kind: str, quantization: str) -> None:
    """A choice of experts may change, and with it SparseMixer's weights, which jump.

    Gemma 4's scores are not divided by the root of a head's size, and so a rounded key counts for more.
    """
    result = verified(build(tmp_path, kind, replace(OPTIONS, dtype="float16", quantization=quantization)))
    assert result.passed
    most = dict.fromkeys((*MIXTURES, *WITH_STATES), 1.2) | {"phimoe": 2.0, "gemma3n": 0.6, "gemma4": 0.6}
    assert 0.015 < result.tolerance < most.get(kind, 0.3)


@pytest.mark.parametrize("kind", ["baichuan2-7b", "qwen2", "llama-tied"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_one_quantized_layer_is_exact(tmp_path: Path, kind: str, quantization: str) -> None:
    """Over one layer the rounding of reference and engine agrees, so that nothing hides behind a wide tolerance.

    In a part of the networks the last bit of a sum decides a tie, and integers differ by one.
    """
    errors = []
    for seed in range(8):
        folder = tmp_path / str(seed)
        make_checkpoint(folder / "one", kind, num_hidden_layers=1, seed=seed)
        build_engine(folder / "one", folder / "engine", replace(OPTIONS, quantization=quantization))
        errors.append(verified(EngineDirectory.open(folder / "engine")).max_error)
        if errors[-1] < 1e-5:
            return
    pytest.fail(f"no network agrees: {errors}")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_tied_network_has_one_matrix_for_both(quantization: str, tmp_path: Path) -> None:
    options = replace(OPTIONS, dtype="float16", quantization=quantization)
    tied, apart = (build(tmp_path / kind, kind, options) for kind in ("llama-tied", "llama"))
    config = KINDS["llama-tied"]
    numbers = config["vocab_size"] * config["hidden_size"]
    saved = apart.engine_file.stat().st_size - tied.engine_file.stat().st_size
    assert numbers <= saved < 1.2 * numbers + 3 * 4096, "the embedding that is apart has eight bits, too"
    assert apart.manifest.device["quantized_params"] == tied.manifest.device["quantized_params"] + 1
    assert verified(apart).passed
    assert verified(tied).passed


def test_outliers_that_weights_undo_are_equalized_before_they_are_rounded(tmp_path: Path) -> None:
    """The same network with and without them, as int8 engines: equally far from the one in float32."""
    plain, planted = tmp_path / "plain", tmp_path / "planted"
    config = KINDS["llama"] | {"torch_dtype": "float32"}
    for folder in (plain, planted):
        make_checkpoint(folder, "llama")
    tensors = random_tensors(config, dtype="float32", seed=0)
    for name, tensor in tensors.items():
        if name.endswith("post_attention_layernorm.weight"):
            tensor[5] *= 256
        elif name.endswith(("gate_proj.weight", "up_proj.weight")):
            tensor[:, 5] /= 256
    write_tensors(planted, tensors, "safetensors")
    logits = {}
    for folder in (plain, planted):
        for quantization in ("", "int8"):
            directory = tmp_path / f"{folder.name}-{quantization}"
            manifest = build_engine(folder, directory, replace(OPTIONS, quantization=quantization))
            assert ("equalized_channels" in manifest.device) == bool(quantization)
            assert verified(EngineDirectory.open(directory)).passed
            with closing(CpuRunner.open(directory / "rank0.engine", num_blocks=4)) as runner:
                logits[directory.name] = prompt_logits(runner, list(range(3, 43)), sequence_id=0)
    np.testing.assert_allclose(logits["planted-"], logits["plain-"], atol=1e-4)
    plain_error, planted_error = (
        np.abs(logits[f"{name}-int8"] - logits["plain-"]).mean() for name in ("plain", "planted")
    )
    assert planted_error < 1.2 * plain_error


@pytest.mark.parametrize("kind", ["baichuan2-7b", "baichuan2-13b", "mistral", "qwen3", "deepseek-v3-moe"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_engines_with_an_int8_cache_stay_within_their_own_tolerance(tmp_path: Path, kind: str, dtype: str) -> None:
    directory = build(tmp_path, kind, replace(OPTIONS, dtype=dtype, kv_cache_dtype="int8"))
    result = verified(directory)
    assert result.passed
    assert result.tolerance < (0.3 if kind in MIXTURES else 0.1)
    config = json.loads((directory.path / "config.json").read_text())
    assert config["pretrained_config"]["quantization"]["kv_cache_quant_algo"] == "INT8"
    assert directory.manifest.dtype == f"{dtype}+kv-int8"


@pytest.mark.parametrize("quantization", ["", "int8", "int4"])
def test_two_builds_have_the_same_bytes(tmp_path: Path, quantization: str) -> None:
    checkpoint = make_checkpoint(tmp_path / "c", "qwen2", dtype="bfloat16")
    for name in ("one", "two"):
        build_engine(checkpoint, tmp_path / name, BuildOptions(quantization=quantization))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    for file in TIMES:  # which differ
        assert (tmp_path / "one" / file).read_bytes()


@pytest.mark.parametrize("quantization", ["", "int8", "int4"])
def test_the_number_of_threads_changes_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    """With pieces so small that every matrix has several."""
    monkeypatch.setattr(pieces, "PIECE_ELEMENTS", 32 * 64)
    checkpoint = make_checkpoint(tmp_path / "c", "baichuan2-7b", dtype="bfloat16")
    made = []
    for threads in (1, 2, 5):
        options = replace(OPTIONS, dtype="float16", quantization=quantization)
        build_engine(checkpoint, tmp_path / "e", options, threads=threads)
        made.append(contents(tmp_path / "e"))
    assert made[0] == made[1] == made[2]
    assert verified(EngineDirectory.open(tmp_path / "e")).passed


def test_a_second_build_reuses_the_timings_of_the_first(tmp_path: Path) -> None:
    directory = build(tmp_path, "llama")
    cache = directory.path / CACHE_FILE
    first = cache.read_text()
    assert CACHE_FILE not in directory.manifest.files
    build_engine(tmp_path / "llama", directory.path, OPTIONS)
    assert cache.read_text() == first
    cache.write_text("{}")  # nothing to reuse: timed again
    build_engine(tmp_path / "llama", directory.path, OPTIONS)
    assert set(json.loads(cache.read_text())["microseconds"]) == set(json.loads(first)["microseconds"])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_weights_go_with_keys_and_values_as_floats(tmp_path: Path, quantization: str) -> None:
    options = replace(OPTIONS, dtype="float16", quantization=quantization, kv_cache_dtype="float16")
    directory = build(tmp_path, "qwen2", options)
    assert read_header(directory.engine_file).cache_dtype == "float16"
    assert directory.manifest.dtype == f"float16+{quantization}+kv-float16"
    assert verified(directory).passed


@pytest.mark.parametrize(("quantization", "kv_cache_dtype"), [("", "auto"), ("", "int8"), ("int8", "float32")])
def test_the_plan_says_what_the_engine_is(tmp_path: Path, quantization: str, kv_cache_dtype: str) -> None:
    options = replace(OPTIONS, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
    directory = build(tmp_path, "llama", options)
    plan = plan_build(tmp_path / "llama", options, measure=lambda: 1.0)
    header = read_header(directory.engine_file)
    assert plan.engine_bytes == pytest.approx(directory.engine_file.stat().st_size, rel=0.1)
    assert plan.kv_bytes_per_token * header.block_size == header.kv_bytes_per_block


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("quantization", ["", "int8", "int4"])
def test_a_sealed_engine_with_damaged_weights_fails_its_selftest(tmp_path: Path, dtype: str, quantization: str) -> None:
    """Damage that every digest agrees with: only running the engine can tell."""
    directory = build(tmp_path, "llama", replace(OPTIONS, dtype=dtype, quantization=quantization))
    content = bytearray(directory.engine_file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 6000] = bytes(6000)  # a part of some matrix becomes zero
    directory.engine_file.write_bytes(content)
    seal(directory.path, directory.manifest)
    assert not verified(EngineDirectory.open(directory.path)).passed


def test_a_self_test_of_another_engine_fails(tmp_path: Path) -> None:
    directory = build(tmp_path, "llama")
    checkpoint = make_checkpoint(tmp_path / "other", "llama", seed=5)
    build_engine(checkpoint, tmp_path / "other-engine", OPTIONS)
    (directory.path / SELFTEST_FILE).write_bytes((tmp_path / "other-engine" / SELFTEST_FILE).read_bytes())
    seal(directory.path, directory.manifest)
    result = verified(EngineDirectory.open(directory.path))
    assert not result.passed
    assert "FAILED" in str(result)


def test_engines_of_other_targets_are_not_run(tmp_path: Path) -> None:
    directory = build(tmp_path, "llama")
    seal(directory.path, replace(directory.manifest, target="tensorrt_llm"))
    assert verify_engine(EngineDirectory.open(directory.path)) is None


def test_the_engine_answers_the_same_whatever_the_chunks(tmp_path: Path) -> None:
    """The self-test's prompts cross chunk and block borders; one chunk for all must give the same bits."""
    small = build(tmp_path, "baichuan2-7b")
    build_engine(tmp_path / "baichuan2-7b", tmp_path / "large", replace(OPTIONS, max_num_tokens=512))
    (*_, prompt) = SelfTest.load(small.path / SELFTEST_FILE).prompts()
    rows = []
    for directory in (small, EngineDirectory.open(tmp_path / "large")):
        runner = CpuRunner.open(directory.engine_file, num_blocks=8)
        rows.append(prompt_logits(runner, prompt, 0))
        runner.close()
    assert len(prompt) > 32
    np.testing.assert_array_equal(rows[0], rows[1])


def test_the_manifest_names_the_device(tmp_path: Path) -> None:
    manifest: Manifest = build(tmp_path, "llama").manifest
    assert manifest.target == "cpu"
    assert manifest.device


def most_memory(
    checkpoint: Path, engine: Path, first: Path, quantizations: Sequence[str] = ("", "int8", "int4")
) -> dict[str, int]:
    """Of builds in this process: the most bytes that each held at once. One thread: several hold the most at the same
    time, or do not, as it happens."""
    build_engine(first, engine, BuildOptions(quantization="int8"))  # imports what a build imports
    peaks = {}
    for quantization in quantizations:
        tracemalloc.start()
        build_engine(checkpoint, engine, BuildOptions(dtype="float16", quantization=quantization), threads=1)
        peaks[quantization] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peaks


@pytest.mark.parametrize("with_passage", [False, True])
def test_memory_stays_near_one_tensor(tmp_path: Path, with_passage: bool) -> None:
    """With a tokenizer also near what a layer makes of the passage that the loss of rounding is measured on."""
    sizes: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 24}
    checkpoint = make_checkpoint(tmp_path / "c", "llama", dtype="bfloat16", with_tokenizer=with_passage, **sizes)
    small = make_checkpoint(tmp_path / "small", "llama", with_tokenizer=with_passage)
    total = (checkpoint / "model.safetensors").stat().st_size
    largest = 2 * 512 * 192 * np.dtype(np.float32).itemsize
    assert total > 24 * largest
    # in a process of its own: what other tests left running here would be counted
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        peaks = pool.submit(most_memory, checkpoint, tmp_path / "engine", small).result()
    made_of_passage = 2 * MOST_TOKENS * 2 * 512 * np.dtype(np.float32).itemsize
    for peak in peaks.values():
        assert peak - 2 * made_of_passage * with_passage < 7 * largest < total / 3


@pytest.mark.parametrize("kind", ["olmoe", "llama4-moe"])
def test_memory_stays_near_a_few_experts(kind: str, tmp_path: Path) -> None:
    """Whether a checkpoint has them one by one, or all of a layer in one tensor with inputs as rows."""
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 8, "vocab_size": 64}
    sizes |= {"num_experts": 96} if kind == "olmoe" else {"num_local_experts": 96, "interleave_moe_layer_step": 1}
    sizes["num_hidden_layers"] = 1
    checkpoint = make_checkpoint(tmp_path / "c", kind, dtype="bfloat16", with_tokenizer=False, **sizes)
    small = make_checkpoint(tmp_path / "small", kind, with_tokenizer=False)
    of_layer = 96 * 3 * 128 * 96 * np.dtype(np.float32).itemsize
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        (peak,) = pool.submit(most_memory, checkpoint, tmp_path / "engine", small, ("int4",)).result().values()
    assert peak < of_layer / 3


def test_memory_does_not_hold_products_of_matrices(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 512, "kv_lora_rank": 128}
    sizes |= {"num_attention_heads": 64, "num_key_value_heads": 64}
    checkpoint = make_checkpoint(tmp_path / "c", "deepseek-v3-moe", dtype="bfloat16", with_tokenizer=False, **sizes)
    small = make_checkpoint(tmp_path / "small", "deepseek-v3-moe", with_tokenizer=False)
    product = 512 * 64 * (128 + 8) * np.dtype(np.float32).itemsize
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        (peak,) = pool.submit(most_memory, checkpoint, tmp_path / "engine", small, ("int4",)).result().values()
    assert peak < product
