"""The checkpoint that TensorRT-LLM 1.2 is given: names, shapes, types, shards that make the original again."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmserve.builder.options import BuildOptions
from llmserve.builder.targets.tensorrt_llm.checkpoint import checkpoint_bytes, checkpoint_problems, write_checkpoint
from llmserve.builder.targets.tensorrt_llm.options import TensorrtLlmOptions
from tests.builder.targets.tensorrt_llm.jobs import FLOAT_TYPES, Opened, by_the_rule, opened, read_rank
from tests.fakes.gpu_machine import gpu_machine

KINDS = ("baichuan2-7b", "baichuan2-13b", "llama", "llama3-rope", "llama-tied", "mistral", "qwen2", "qwen3")
LAYER_NAMES = {
    "attention.dense.weight", "attention.qkv.weight", "input_layernorm.weight", "mlp.fc.weight", "mlp.gate.weight",
    "mlp.proj.weight", "post_layernorm.weight",
}  # fmt: skip


def options(tp: int = 1, pp: int = 1, **values: Any) -> BuildOptions:
    common = {"dtype": "float32", "target": "tensorrt_llm", **values}
    return BuildOptions.from_flat({"tp_size": tp, "pp_size": pp, **common})


def written(opened: Opened, folder: Path) -> list[dict[str, NDArray[Any]]]:
    folder.mkdir()
    write_checkpoint(opened.job, folder, spec=opened.spec, config=opened.config, quantize=by_the_rule)
    world_size = opened.job.options.of(TensorrtLlmOptions).world_size
    return [read_rank(folder, rank) for rank in range(world_size)]


def config_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_one_rank_has_the_names_and_types_of_the_converters(kind: str, dtype: str, tmp_path: Path) -> None:
    with opened(tmp_path / "hf", kind, options(dtype=dtype)) as source:
        (rank,) = written(source, tmp_path / "out")
    extra = {"qwen2": {"attention.qkv.bias"}, "qwen3": {"attention.q_layernorm.weight", "attention.k_layernorm.weight"}}
    layer_names = LAYER_NAMES | extra.get(kind, set())
    expected = {"transformer.vocab_embedding.weight", "transformer.ln_f.weight", "lm_head.weight"}
    expected |= {f"transformer.layers.{i}.{name}" for i in range(source.spec.num_layers) for name in layer_names}
    assert set(rank) == expected
    assert {array.dtype for array in rank.values()} == {np.dtype(FLOAT_TYPES[dtype])}
    inner, hidden = source.spec.intermediate_size, source.spec.hidden_size
    assert rank["transformer.layers.0.mlp.proj.weight"].shape == (hidden, inner)
    assert rank["transformer.layers.0.mlp.gate.weight"].shape == (inner, hidden)


def test_fc_is_the_projection_that_is_activated(tmp_path: Path) -> None:
    with opened(tmp_path / "hf", "llama", options()) as source:
        (rank,) = written(source, tmp_path / "out")
        gate_up = source.param("layers.1.mlp.gate_up")
    inner = source.spec.intermediate_size
    np.testing.assert_array_equal(rank["transformer.layers.1.mlp.fc.weight"], gate_up[:inner])
    np.testing.assert_array_equal(rank["transformer.layers.1.mlp.gate.weight"], gate_up[inner:])


@pytest.mark.parametrize(
    ("kind", "tp"), [("baichuan2-7b", 2), ("baichuan2-13b", 3), ("qwen2", 2), ("qwen3", 2), ("llama", 4)]
)
def test_tensor_parallel_shards_make_the_original_again(kind: str, tp: int, tmp_path: Path) -> None:
    """llama with four ranks has two key-value heads: each is in two ranks."""
    sizes = {"intermediate_size": 192} if tp == 3 else {}
    with opened(tmp_path / "hf", kind, options(tp=tp), **sizes) as source:
        ranks = written(source, tmp_path / "out")
        spec = source.spec
        for layer in range(spec.num_layers):
            name = f"transformer.layers.{layer}"
            check_qkv(
                [rank[f"{name}.attention.qkv.weight"] for rank in ranks],
                source.param(f"layers.{layer}.attn.qkv"),
                source,
            )
            if kind == "qwen2":
                biases = [rank[f"{name}.attention.qkv.bias"] for rank in ranks]
                check_qkv(biases, source.param(f"layers.{layer}.attn.qkv.bias"), source)
            joined = {
                part: np.concatenate([rank[f"{name}.mlp.{part}.weight"] for rank in ranks]) for part in ("fc", "gate")
            }
            np.testing.assert_array_equal(
                np.concatenate([joined["fc"], joined["gate"]]), source.param(f"layers.{layer}.mlp.gate_up")
            )
            for ours, theirs in (("attn.output", "attention.dense"), ("mlp.down", "mlp.proj")):
                columns = np.concatenate([rank[f"{name}.{theirs}.weight"] for rank in ranks], axis=1)
                np.testing.assert_array_equal(columns, source.param(f"layers.{layer}.{ours}"))
        head = np.concatenate([rank["lm_head.weight"] for rank in ranks])
        np.testing.assert_array_equal(head[: spec.vocab_size], source.param("head"))
        assert not head[spec.vocab_size :].any()
        for rank in ranks:
            np.testing.assert_array_equal(rank["transformer.vocab_embedding.weight"], source.param("embed"))
            np.testing.assert_array_equal(rank["transformer.ln_f.weight"], source.param("norm"))


def check_qkv(parts: list[NDArray[Any]], whole: NDArray[Any], source: Opened) -> None:
    """Each rank: its query heads, then its key heads, then its value heads."""
    spec, tp = source.spec, len(parts)
    q_width, kv_width = spec.num_heads * spec.head_dim // tp, max(1, spec.num_kv_heads // tp) * spec.head_dim
    copies = max(1, tp // spec.num_kv_heads)
    q = np.concatenate([part[:q_width] for part in parts])
    k = np.concatenate([part[q_width : q_width + kv_width] for part in parts[::copies]])
    v = np.concatenate([part[q_width + kv_width :] for part in parts[::copies]])
    np.testing.assert_array_equal(np.concatenate([q, k, v]), whole)
    for first in range(0, tp, copies):
        for part in parts[first : first + copies]:
            np.testing.assert_array_equal(part[q_width:], parts[first][q_width:])


def test_a_vocabulary_that_the_ranks_do_not_divide_is_padded(tmp_path: Path) -> None:
    with opened(tmp_path / "hf", "llama", options(tp=4), vocab_size=318) as source:
        ranks = written(source, tmp_path / "out")
    assert [rank["lm_head.weight"].shape[0] for rank in ranks] == [80] * 4
    assert not ranks[3]["lm_head.weight"][-2:].any()
    assert ranks[3]["lm_head.weight"][-3].any()


def test_pipeline_stages_have_their_layers_and_the_ends(tmp_path: Path) -> None:
    with opened(tmp_path / "hf", "llama", options(tp=2, pp=2), num_hidden_layers=4) as source:
        ranks = written(source, tmp_path / "out")
        q_norm_of_layer_2 = source.param("layers.2.attn.norm")
    layers = [{name.split(".")[2] for name in rank if ".layers." in name} for rank in ranks]
    assert layers == [{"0", "1"}] * 4
    assert ["transformer.vocab_embedding.weight" in rank for rank in ranks] == [True, True, False, False]
    for name in ("lm_head.weight", "transformer.ln_f.weight"):
        assert [name in rank for rank in ranks] == [False, False, True, True]
    np.testing.assert_array_equal(ranks[2]["transformer.layers.0.input_layernorm.weight"], q_norm_of_layer_2)
    assert config_of(tmp_path / "out")["mapping"] == {"world_size": 4, "tp_size": 2, "pp_size": 2}


@pytest.mark.parametrize(("precision", "columns"), [("int8", 192), ("int4", 96)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weight_only_tensors_and_their_scales(precision: str, columns: int, dtype: str, tmp_path: Path) -> None:
    wanted = options(tp=2, dtype=dtype, quantization=precision)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_key_value_heads": 4}
    with opened(tmp_path / "hf", "llama", wanted, **sizes) as source:
        ranks = written(source, tmp_path / "out")
        down = source.param("layers.0.mlp.down")
    for index, rank in enumerate(ranks):
        shapes = {name.removeprefix("transformer.layers.0."): array.shape for name, array in rank.items()}
        assert shapes["mlp.fc.weight"] == (128, columns)  # inputs, then outputs
        assert shapes["mlp.fc.per_channel_scale"] == (192,)
        assert shapes["mlp.proj.weight"] == (192, 128 if precision == "int8" else 64)
        assert shapes["attention.qkv.per_channel_scale"] == (64 + 2 * 64,)
        kinds = {name.rpartition(".")[2]: array.dtype for name, array in rank.items() if ".layers.0.mlp." in name}
        assert kinds == {"weight": np.int8, "per_channel_scale": np.dtype(FLOAT_TYPES[dtype])}
        assert "lm_head.per_channel_scale" not in rank
        assert rank["lm_head.weight"].dtype == FLOAT_TYPES[dtype]
        # the rank's own columns decide its scales
        scales = np.abs(down[:, index * 192 : (index + 1) * 192].astype(np.float32)).max(axis=1) / (
            128 if precision == "int8" else 8
        )
        np.testing.assert_array_equal(
            rank["transformer.layers.0.mlp.proj.per_channel_scale"], scales.astype(FLOAT_TYPES[dtype])
        )
    algorithm = {"int8": "W8A16", "int4": "W4A16"}[precision]
    assert config_of(tmp_path / "out")["quantization"] == {"quant_algo": algorithm, "kv_cache_quant_algo": None}


def test_the_size_is_known_before(tmp_path: Path) -> None:
    wanted = options(tp=2, quantization="int4")
    with opened(
        tmp_path / "hf", "llama", wanted, hidden_size=128, intermediate_size=384, num_key_value_heads=4
    ) as source:
        ranks = written(source, tmp_path / "out")
        expected = checkpoint_bytes(source.job.params, source.spec, wanted)
    assert sum(array.nbytes for rank in ranks for array in rank.values()) == expected


def test_baichuan2_7b_is_a_llama_and_13b_is_not(tmp_path: Path) -> None:
    with opened(tmp_path / "7b", "baichuan2-7b", options()) as source:
        (rank,) = written(source, tmp_path / "out-7b")
    config = config_of(tmp_path / "out-7b")
    assert (config["architecture"], config["position_embedding_type"]) == ("LlamaForCausalLM", "rope_gpt_neox")
    assert (config["rotary_base"], config["rotary_scaling"], config["num_key_value_heads"]) == (10000.0, None, 4)
    np.testing.assert_allclose(np.linalg.norm(rank["lm_head.weight"], axis=1), 1.0, rtol=1e-6)
    with opened(tmp_path / "13b", "baichuan2-13b", options()) as source:
        (rank,) = written(source, tmp_path / "out-13b")
    config = config_of(tmp_path / "out-13b")
    assert (config["architecture"], config["position_embedding_type"]) == ("BaichuanForCausalLM", "alibi")
    assert (config["model_version"], config["max_position_embeddings"]) == ("v2_13b", 256)
    assert "rotary_base" not in config
    np.testing.assert_allclose(np.linalg.norm(rank["lm_head.weight"], axis=1), 1.0, rtol=1e-6)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_class_finds_what_it_reads(kind: str, tp: int, pp: int, tmp_path: Path) -> None:
    """The fakes have of each class which attributes it reads, and which tensors of which shapes it then has."""
    wanted = options(tp=tp, pp=pp)
    with opened(tmp_path / "hf", kind, wanted, num_hidden_layers=2) as source:
        if checkpoint_problems(source.spec, source.config, wanted):
            assert (kind, pp) == ("baichuan2-13b", 2)
            return
        ranks = written(source, tmp_path / "out")
    with gpu_machine("1.2"):
        models = import_module("tensorrt_llm.models")
        config = import_module("tensorrt_llm.models.modeling_utils").PretrainedConfig
        for rank in range(len(ranks)):
            read = config.from_json_file(str(tmp_path / "out/config.json"))
            read.set_rank(rank)
            models.MODEL_MAP[read.architecture].from_checkpoint(str(tmp_path / "out"), config=read)


@pytest.mark.parametrize("name", ["seq_length", "qwen_type"])
def test_a_class_that_misses_an_attribute_fails(name: str, tmp_path: Path) -> None:
    with opened(tmp_path / "hf", "qwen2", options()) as source:
        written(source, tmp_path / "out")
    content = {key: value for key, value in config_of(tmp_path / "out").items() if key != name}
    with gpu_machine("1.2"):
        models = import_module("tensorrt_llm.models")
        config = import_module("tensorrt_llm.models.modeling_utils").PretrainedConfig.from_dict(content)
        with pytest.raises(AttributeError, match=f"'QWenConfig' object has no attribute '{name}'"):
            models.QWenForCausalLM.from_checkpoint(str(tmp_path / "out"), config=config)


def test_the_config_says_what_an_architecture_adds(tmp_path: Path) -> None:
    found = {}
    for kind in ("llama3-rope", "qwen2", "qwen3", "mistral"):
        with opened(tmp_path / kind, kind, options()) as source:
            written(source, tmp_path / f"out-{kind}")
        found[kind] = config_of(tmp_path / f"out-{kind}")
    assert found["llama3-rope"]["rotary_base"] == 500000.0
    assert found["llama3-rope"]["rotary_scaling"] == {
        "type": "llama3", "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    assert (found["qwen2"]["qwen_type"], found["qwen2"]["attn_bias"]) == ("qwen2", True)
    assert (found["qwen3"]["qwen_type"], found["qwen3"]["attn_bias"]) == ("qwen3", False)
    assert (found["qwen2"]["seq_length"], found["qwen3"]["seq_length"]) == (8192, 8192)
    assert (found["qwen3"]["qk_layernorm"], found["qwen3"]["head_size"]) == (True, 32)
    assert found["mistral"]["architecture"] == "MistralForCausalLM"


def test_what_cannot_be_split_or_said_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "hf", "llama", options()) as source:
        spec, config = source.spec, source.config
    assert checkpoint_problems(spec, config, options(tp=2)) == []
    found = checkpoint_problems(spec, config, options(tp=3, pp=3))
    assert [text.split(",")[0] for text in found] == [
        "tp_size 3 does not divide the 4 attention heads",
        "tp_size 3 and the 2 key-value heads do not divide each other",
        "tp_size 3 does not divide intermediate_size 176",
        "pp_size 3 does not divide the 2 layers",
    ]
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert (
        "do not support rope type 'yarn'" in checkpoint_problems(spec, {**config, "rope_scaling": scaled}, options())[0]
    )
    narrow = checkpoint_problems(spec, config, options(quantization="int8", dtype="float16"))
    assert narrow == [
        "weight-only quantization requires sizes that are multiples of 64, but intermediate_size of a rank is 176"
    ]


def test_weight_only_layers_pad_their_sizes_for_all_ranks_together(tmp_path: Path) -> None:
    sizes = {"hidden_size": 192, "intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 64}
    with opened(tmp_path / "hf", "llama", options(), **sizes) as source:
        spec, config = source.spec, source.config
    assert checkpoint_problems(spec, config, options(quantization="int8", dtype="float16")) == []
    assert checkpoint_problems(spec, config, options(tp=2, quantization="int8", dtype="float16")) == [
        "weight-only quantization requires sizes that are multiples of 128, but hidden_size is 192"
    ]


def test_weight_only_kernels_are_for_half_precision(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    with opened(tmp_path / "hf", "llama", options(), **sizes) as source:
        found = checkpoint_problems(source.spec, source.config, options(quantization="int4"))
    assert found == ["weight-only quantization has no kernels for float32; build with --dtype float16 or bfloat16"]


def test_baichuan_with_alibi_has_no_pipeline_stages(tmp_path: Path) -> None:
    with opened(tmp_path / "13b", "baichuan2-13b", options()) as source:
        (problem,) = checkpoint_problems(source.spec, source.config, options(pp=2))
    assert "in every stage; use --tp-size instead" in problem
    with opened(tmp_path / "7b", "baichuan2-7b", options()) as source:  # which is Llama there
        assert checkpoint_problems(source.spec, source.config, options(pp=2)) == []


@pytest.mark.parametrize(("kv_heads", "tp"), [(4, 1), (2, 4)])
def test_qwen3_with_as_many_key_value_heads_is_refused(kv_heads: int, tp: int, tmp_path: Path) -> None:
    """The real class then splits the projection as if query, key and value of each head were neighbours."""
    with opened(tmp_path / "qwen3", "qwen3", options(), num_key_value_heads=kv_heads) as source:
        (problem,) = checkpoint_problems(source.spec, source.config, options(tp=tp))
        assert f"with tp_size {tp} it has {4 // tp} of each" in problem
    with opened(tmp_path / "qwen2", "qwen2", options(), num_key_value_heads=kv_heads) as source:  # has no such norms
        assert checkpoint_problems(source.spec, source.config, options(tp=tp)) == []
