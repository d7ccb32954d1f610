"""`llmserve build --target tensorrt_llm` on a fake machine with GPUs: both modes, from checkpoint to directory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.builder.targets.tensorrt_llm.ranks import limits_of, plugins_of
from llmserve.builder.targets.tensorrt_llm.target import TensorrtLlmTarget, num_workers
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.machine.nvidia import visible_gpus
from llmserve.errors import InternalError, RecipeError, Unsupported
from llmserve.models.registry import architecture_for
from tests.checkpoints import KINDS, make_checkpoint
from tests.fakes.gpu_machine import gpu_machine


def options(**values: Any) -> BuildOptions:
    return BuildOptions.from_flat({"dtype": "float16", "target": "tensorrt_llm", "max_batch_size": 4, **values})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", "llama", **sizes)


def test_engine_mode_leaves_what_the_library_wrote_and_our_manifest(checkpoint: Path, tmp_path: Path) -> None:
    with gpu_machine("1.2"):
        manifest = build_engine(checkpoint, tmp_path / "e", options(tp_size=2, workers=2, quantization="int8"))
    directory = EngineDirectory.open(tmp_path / "e")
    assert manifest.device == {
        "mode": "engine", "tensorrt_llm": "1.2.1", "tensorrt": "10.0.0", "gpu": "NVIDIA Fake 80GB",
        "compute_capability": "9.0", "driver": "570.00", "world_size": 2,
    }  # fmt: skip
    assert {"rank0.engine", "rank1.engine", "config.json", "hf_config.json"} <= set(manifest.files)
    assert not {"selftest.npz", "model.cache"} & set(manifest.files)
    assert [path.name for path in (tmp_path / "e").iterdir() if path.name.startswith(".")] == []
    assert directory.config["version"] == "1.2.1"
    assert directory.config["pretrained_config"]["quantization"]["quant_algo"] == "W8A16"
    assert (directory.info().target, directory.info().max_batch_size, directory.info().max_seq_len) == (
        "tensorrt_llm",
        4,
        256,
    )
    assert manifest.options["tensorrt_llm"]["tp_size"] == 2
    assert "workers" not in manifest.options["tensorrt_llm"]


def test_the_timing_cache_of_the_last_build_is_used_again(checkpoint: Path, tmp_path: Path) -> None:
    """The fake's compiler asserts that the cache that it is given holds what it left."""
    with gpu_machine("1.2"):
        first = build_engine(checkpoint, tmp_path / "e", options())
        assert (tmp_path / "e/model.cache").read_text() == "timings"
        again = build_engine(checkpoint, tmp_path / "e", options())
        (tmp_path / "e/model.cache").write_text("of another library")
        with pytest.raises(InternalError, match="AssertionError"):
            build_engine(checkpoint, tmp_path / "e", options())
    assert again.engine_digest == first.engine_digest


def test_llm_mode_holds_a_checkpoint_and_the_arguments(checkpoint: Path, tmp_path: Path) -> None:
    with gpu_machine("1.3"):
        manifest = build_engine(checkpoint, tmp_path / "e", options(tp_size=2))
    assert (manifest.device["mode"], manifest.device["tensorrt_llm"]) == ("llm", "1.3.0")
    assert {"checkpoint/model.safetensors", "checkpoint/config.json", "llm_args.json"} <= set(manifest.files)
    assert json.loads((tmp_path / "e/llm_args.json").read_text()) == {
        "tensor_parallel_size": 2, "pipeline_parallel_size": 1, "dtype": "float16", "max_batch_size": 4,
        "max_num_tokens": 2048, "max_seq_len": 256, "max_beam_width": 1,
    }  # fmt: skip
    EngineDirectory.open(tmp_path / "e").verify()


@pytest.mark.parametrize(
    ("how", "words"), [("fail", "RuntimeError: Engine building failed"), ("die", "ended abnormally")]
)
def test_a_rank_that_fails_fails_the_build(checkpoint: Path, tmp_path: Path, how: str, words: str) -> None:
    with gpu_machine("1.2", FAKE_TRTLLM_BUILD=how), pytest.raises(InternalError, match=words):
        build_engine(checkpoint, tmp_path / "e", options(tp_size=2))
    assert list(tmp_path.iterdir()) == []


def test_options_become_arguments() -> None:
    wanted = options(
        max_seq_len=100, max_batch_size=2, max_num_tokens=77, max_beam_width=3, gemm_plugin="disable",
        reduce_fusion="enable", gpt_attention_plugin="float16", context_fmha="disable", multiple_profiles="enable",
        tokens_per_block=64, use_weight_only=True, weight_only_precision="int4",
    )  # fmt: skip
    assert limits_of(wanted) == {
        "max_batch_size": 2, "opt_batch_size": 2, "max_input_len": 99, "max_seq_len": 100, "max_num_tokens": 77,
        "max_beam_width": 3,
    }  # fmt: skip
    assert plugins_of(wanted) == {
        "gpt_attention_plugin": "float16", "gemm_plugin": None, "weight_only_quant_matmul_plugin": "auto",
        "context_fmha": False, "remove_input_padding": True, "tokens_per_block": 64, "multiple_profiles": True,
        "reduce_fusion": True, "use_fused_mlp": False,
    }  # fmt: skip
    assert plugins_of(options())["weight_only_quant_matmul_plugin"] is None


def test_every_worker_has_a_gpu() -> None:
    with gpu_machine("1.2", FAKE_GPUS="2"):
        gpus = visible_gpus()
    assert num_workers(options(tp_size=4, workers=3), gpus) == 2
    assert num_workers(options(tp_size=4, parallel_build=True), gpus) == 2
    assert num_workers(options(tp_size=1, workers=3), gpus) == 1


def test_a_machine_without_anything_says_what_is_missing(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(Unsupported) as caught:
        build_engine(checkpoint, tmp_path / "e", options())
    for words in (
        "tensorrt-llm, which is not installed",
        "pip install 'llmserve[tensorrt]'",
        "nvidia-smi was not found",
        "--target cpu",
    ):
        assert words in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kv_cache_type": "continuous"}, "kv_cache_type continuous cannot be served"),
        ({"remove_input_padding": "disable"}, "remove_input_padding disable cannot be served"),
        ({"gpt_attention_plugin": "disable"}, "gpt_attention_plugin disable cannot be served"),
        ({"max_input_len": 256}, "leaves no token for the answer"),
        ({"tp_size": 3}, "tp_size 3 does not divide the 4 attention heads"),
        ({"gemm_plugin": "float7", "workers": 0}, "2 problems"),
        ({"kv_cache_dtype": "int8"}, "calibrated scales"),
        ({"calibration_data": "a.jsonl", "quantization": "int8"}, "calibration_data has no effect"),
    ],
)
def test_what_cannot_be_built_is_refused(checkpoint: Path, tmp_path: Path, values: dict[str, Any], words: str) -> None:
    with gpu_machine("1.2"), pytest.raises(RecipeError, match=words):
        build_engine(checkpoint, tmp_path / "e", options(**values))


@pytest.mark.parametrize("capability", ["10.0", "10.3", "11.0"])
def test_weight_only_engines_are_refused_for_gpus_that_have_no_kernels(
    checkpoint: Path, tmp_path: Path, capability: str
) -> None:
    machine = gpu_machine("1.2", FAKE_GPU_CAPABILITY=capability, FAKE_GPUS="1")
    words = rf"no weight-only engine for GPU 0, .*{re.escape(capability)}.* below 10\.0 and from 12\.0 on"
    with machine, pytest.raises(RecipeError, match=words):
        build_engine(checkpoint, tmp_path / "e", options(quantization="int8"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("capability", ["9.0", "12.0"])
def test_other_gpus_have_them(checkpoint: Path, tmp_path: Path, capability: str) -> None:
    with gpu_machine("1.2", FAKE_GPU_CAPABILITY=capability):
        manifest = build_engine(checkpoint, tmp_path / "e", options(quantization="int4"))
    assert manifest.device["compute_capability"] == capability


def test_what_the_library_does_otherwise_is_said(tmp_path: Path) -> None:
    def notes(kind: str, **values: Any) -> list[str]:
        config = KINDS[kind]
        with gpu_machine("1.2"):
            return TensorrtLlmTarget(architecture_for(config).from_hf(config), config).notes(options(**values))

    assert notes("llama", tp_size=2, reduce_fusion="enable") == []
    assert notes("baichuan2-7b", tp_size=2, reduce_fusion="enable") == []  # a Llama there
    for kind, tp in (("llama", 1), ("mistral", 2)):
        (note,) = notes(kind, tp_size=tp, reduce_fusion="enable")
        assert "reduce_fusion enable has no effect" in note
    (note,) = notes("qwen3")
    assert "normalizes queries and keys with eps 1e-05, the checkpoint with 1e-06" in note


def test_llm_mode_says_which_options_have_no_effect(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with gpu_machine("1.3"):
        build_engine(checkpoint, tmp_path / "e", options(gemm_plugin="float16", workers=2))
    assert [record.getMessage() for record in caplog.records] == [
        "gemm_plugin float16 has no effect: tensorrt_llm.LLM compiles no engine",
        "workers 2 has no effect: tensorrt_llm.LLM compiles no engine",
    ]


def test_the_cpu_target_takes_them_too(checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = {"target": "cpu", "gemm_plugin": "float16", "remove_input_padding": "enable", "kv_cache_type": "paged"}
    digest = build_engine(checkpoint, tmp_path / "e", options(**values)).engine_digest
    assert [record.getMessage() for record in caplog.records] == [
        "without effect on the cpu target: gemm_plugin float16"
    ]
    assert build_engine(checkpoint, tmp_path / "f", options(target="cpu")).engine_digest == digest
    with pytest.raises(RecipeError) as caught:
        build_engine(checkpoint, tmp_path / "g", options(target="cpu", tp_size=2, max_beam_width=4))
    assert "tp_size 2 is for the tensorrt_llm target" in str(caught.value)
    assert "max_beam_width 4 is for the tensorrt_llm target" in str(caught.value)


def test_use_weight_only_says_the_quantization() -> None:
    assert options(use_weight_only=True).quantization == "int8"
    assert options(use_weight_only=True, weight_only_precision="int4").quantization == "int4"
    with pytest.raises(RecipeError, match="differ"):
        options(use_weight_only=True, quantization="int4")
    assert options(weight_only_precision="int3").problems() != []
