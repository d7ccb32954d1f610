"""Rotary frequencies against transformers' own, what is refused, and the ALiBi slopes of the paper."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmserve.errors import CheckpointError
from llmserve.models.alibi import alibi_slopes
from llmserve.models.config import ConfigReader
from llmserve.models.registry import architecture_for, position_limit
from llmserve.models.rope import read_rope
from llmserve.models.spec import Rope
from tests.checkpoints import KINDS

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_of(**config: Any) -> Rope:
    reader = ConfigReader({"max_position_embeddings": 4096} | config)
    rope = read_rope(reader, 128)
    reader.finish()
    return rope


def longrope(long: list[float], short: list[float] | None = None) -> dict[str, Any]:
    return {"rope_type": "longrope", "long_factor": long, "short_factor": short or long, "attention_factor": 1.0}


FACTORS = [1 + i / 9 for i in range(64)]
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"type": "linear", "factor": 4.0},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    {"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.8782488562869419},  # of DeepSeek-R1-0528-Qwen3-8B
    {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096, "finetuned": True},  # of Yarn-Llama-2
    {"rope_type": "default", "mrope_section": [16, 24, 24], "mrope_interleaved": True},  # of Qwen3-VL's language model
    {"rope_type": "yarn", "factor": 8.0, "beta_fast": 20, "beta_slow": 3, "truncate": False},
    longrope(FACTORS) | {"original_max_position_embeddings": 4096},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: "-".join(map(str, scaling.values()))[:40])
def test_frequencies_equal_transformers(scaling: dict[str, Any]) -> None:
    """At the head size and the base of Llama 3, in the old and the new style."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    sizes: dict[str, Any] = {"hidden_size": 512, "num_attention_heads": 4, "max_position_embeddings": 4096}
    old = {"rope_theta": 500000.0, "rope_scaling": scaling}
    new = {"rope_parameters": {"rope_type": scaling.get("type"), "rope_theta": 500000.0} | scaling}
    oracle = LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=dict(new["rope_parameters"])))
    for style in (old, new):
        rope = rope_of(**style)
        assert rope.inv_freq == pytest.approx(oracle.inv_freq.tolist(), rel=1e-5)
        assert rope.scale == pytest.approx(oracle.attention_scaling)


def test_new_style_and_old_style_agree() -> None:
    old = rope_of(rope_theta=500000.0, rope_scaling={"rope_type": "llama3", **LLAMA3})
    assert old == rope_of(rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3})
    assert old != rope_of(rope_theta=500000.0)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MSCALES = {"short_mscale": 1.1, "long_mscale": 1.2}
ADDED: dict[str, dict[str, Any]] = {
    "llama": YARN,
    "hunyuan": {"type": "dynamic", "alpha": 50.0, "factor": 1.0},
    "ministral3": YARN | {"rope_theta": 1e6, "llama_4_scaling_beta": 0.2},
    "phimoe": longrope(FACTORS[:8]) | MSCALES | {"original_max_position_embeddings": 64},
    "gemma3": {"rope_type": "linear", "factor": 8.0},
}


@pytest.mark.parametrize("kind", ADDED)
def test_a_scaling_beside_rope_parameters_is_read_as_by_transformers(kind: str, tmp_path: Path) -> None:
    """A checkpoint that transformers 5 saved, and whose user added `rope_scaling` as the model's card says."""
    from transformers import AutoConfig

    old = {key: value for key, value in KINDS[kind].items() if not key.startswith("rope_")}
    saved = AutoConfig.for_model(**old).to_dict()
    assert saved["rope_parameters"]
    config = saved | {"rope_scaling": ADDED[kind]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = AutoConfig.from_pretrained(tmp_path).rope_parameters
    expected = old | {"rope_parameters": read}
    ours, theirs = (architecture_for(one).from_hf(one) for one in (config, expected))
    assert ours == theirs
    assert ours != architecture_for(saved).from_hf(saved)


def test_a_scaling_must_not_lose_what_rope_parameters_say() -> None:
    new = {"rope_type": "default", "rope_theta": 500000.0}
    with pytest.raises(CheckpointError, match=r"has no rope_theta: give it there, too \(rope_theta: 500000.0\)"):
        rope_of(rope_parameters=new, rope_scaling=YARN)
    both = rope_of(rope_parameters=new, rope_scaling=YARN | {"rope_theta": 500000.0})
    assert both == rope_of(rope_theta=500000.0, rope_scaling=YARN)
    assert rope_of(rope_parameters=new, rope_scaling={}) == rope_of(rope_parameters=new)
    with pytest.raises(CheckpointError, match=r"rope_scaling .* is not supported"):
        architecture_for(KINDS["gemma4"]).from_hf(KINDS["gemma4"] | {"rope_scaling": YARN})


def test_longrope_with_one_set_of_factors_divides_the_frequencies() -> None:
    plain, found = rope_of(), rope_of(rope_scaling=longrope(FACTORS))
    assert found.inv_freq == tuple(f / factor for f, factor in zip(plain.inv_freq, FACTORS, strict=True))
    assert found.scale == 1.0


def test_defaults() -> None:
    assert rope_of() == rope_of(rope_theta=10000.0, rope_scaling=None) == rope_of(rope_parameters={"rope_theta": 10000})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"rope_scaling": {"type": "su", "factor": 2.0}},
            "rope type 'su' is not supported; supported: default",
        ),
        ({"rope_scaling": {"rope_type": "su"}}, "rope type 'su' is not supported"),
        (
            {"rope_scaling": {"rope_type": "longrope"}},
            "rope type 'longrope' needs a positive attention_factor, got None",
        ),
        ({"rope_scaling": longrope([1.0])}, "long_factor must be a list of 64 positive numbers, got [1.0]"),
        (
            {"rope_scaling": longrope([1.0] * 63 + [0])},
            "long_factor must be a list of 64 positive numbers, got [1.0, 1.0",
        ),
        ({"rope_scaling": longrope([1.0] * 64, [2.0] * 64)}, "factors that change with the length of a sequence"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope type ['yarn'] is not supported"),
        ({"rope_scaling": "linear"}, "must be an object, got 'linear'"),
        ({"rope_scaling": {"type": "linear"}}, "rope type 'linear' needs a positive factor, got None"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "needs a positive factor, got '2'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta": [1]}}, "'beta' is unknown"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs a positive low_freq_factor, got None"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": -1}}, "needs a positive beta_fast, got -1"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 1}}, "truncate must be true or false"),
        ({"rope_scaling": {"type": "linear", "factor": 10**400}}, "needs a positive factor, got 1000"),
        ({"rope_theta": 0}, "needs a positive rope_theta, got 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "'full_attention' is unknown"),
    ],
)
def test_bad_values_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        rope_of(**config)
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        ({"rope_type": "default"}, 4096),
        ({"type": "linear", "factor": 2.5}, 10240),
        ({"type": "linear", "factor": 1e300}, 2**31 - 1),
        ({"type": "linear", "factor": 1e-9}, 1),
        ({"rope_type": "llama3", **LLAMA3}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 4096),
        ({"rope_type": "yarn", "factor": 4.0}, 16384),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_a_scaling_stretches_the_longest_sequence(kind: str, scaling: dict[str, Any], limit: int) -> None:
    """In the build, and in the reader of text files, which must not contradict it."""
    both = {"rope_scaling": scaling, "rope_parameters": {"rope_type": "default"}}
    for keys in ({"rope_scaling": scaling}, {"rope_parameters": scaling}, both):
        config = KINDS[kind] | {"max_position_embeddings": 4096, "model_max_length": 99} | keys
        assert architecture_for(config).from_hf(config).max_position_embeddings == limit
        assert position_limit(config) == limit


def test_the_position_limit_is_not_about_how_numbers_are_stored() -> None:
    config = KINDS["gemma3"]  # whose limit only the architecture knows
    assert position_limit(config | {"quantization_config": {"quant_method": "gptq"}}) == position_limit(config) == 256


def test_position_limits_of_other_configs() -> None:
    assert position_limit({}) is None
    assert position_limit({"max_position_embeddings": "many"}) is None
    assert position_limit({"model_max_length": 1e30}) is None
    assert position_limit({"model_max_length": 64}) == 64
    assert position_limit({"max_position_embeddings": 8, "rope_scaling": {"type": "dynamic", "factor": 2.0}}) == 8
    for kind, config in KINDS.items():
        assert position_limit(config) == architecture_for(config).from_hf(config).max_position_embeddings, kind


def test_a_bad_scaling_is_one_problem() -> None:
    config = KINDS["llama"] | {"rope_scaling": "linear"}
    with pytest.raises(CheckpointError) as caught:
        architecture_for(config).from_hf(config)
    assert str(caught.value).count("must be an object") == 1


def test_alibi_slopes_of_a_power_of_two() -> None:
    assert alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))


def test_alibi_slopes_of_other_head_counts() -> None:
    """Six heads: the four slopes of four heads, then the first and the third of eight."""
    assert alibi_slopes(6) == pytest.approx((0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125))
    slopes = alibi_slopes(40)  # the published 13B models
    assert len(slopes) == 40
    assert slopes[:2] == pytest.approx((2**-0.25, 2**-0.5))
    assert slopes[32:34] == pytest.approx((2**-0.125, 2**-0.375))
