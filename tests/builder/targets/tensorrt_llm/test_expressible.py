"""What cannot be said to TensorRT-LLM is refused by name, everything at once."""

from __future__ import annotations

from typing import Any

import pytest

from llmserve.builder.targets.tensorrt_llm.expressible import ARCHITECTURES, network_problems
from llmserve.models.graph import CacheShape, Graph
from llmserve.models.registry import architecture_for
from tests.checkpoints import KINDS


def problems_of(kind: str, **overrides: Any) -> list[str]:
    config = KINDS[kind] | overrides
    architecture = architecture_for(config)
    spec = architecture.from_hf(config)
    return network_problems(spec, architecture.program(spec), architecture.params(spec))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind]["architectures"][0] in ARCHITECTURES])
def test_nothing_to_complain_about(kind: str) -> None:
    assert problems_of(kind) == []


@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "phi3", "phi4-mini"])
def test_other_architectures_are_refused_with_all_that_they_have(kind: str) -> None:
    found = problems_of(kind)
    assert f"architecture {KINDS[kind]['architectures'][0]} cannot be written" in found[0]
    rest = {"gemma2": 6, "gemma3": 4, "phi3": 0, "phi4-mini": 1}[kind]
    assert len(found) == 1 + rest, found


def test_qwen3_with_biases() -> None:
    (problem,) = problems_of("qwen3", attention_bias=True)
    assert "Qwen3 has no attention_bias" in problem


def test_every_attribute_that_it_has_no_word_for() -> None:
    config = KINDS["llama"]
    architecture = architecture_for(config)
    spec = architecture.from_hf(config)
    g = Graph(CacheShape(1, 1, 8), 8)
    x = g.rms_norm(g.embed("embed", 8, scale=2.0), "norm", eps=1e-5, offset=1.0)
    q = g.rope(x, head_dim=8, inv_freq=(1.0, 0.5))
    y = g.attention(q, x, x, layer=0, num_heads=1, num_kv_heads=1, head_dim=8, scale=0.25, soft_cap=50.0)
    y = g.gated_activation(y, activation="gelu_tanh")
    g.logits(g.select_rows(y), "head", scale=0.5, soft_cap=30.0)
    found = network_problems(spec, g.program(), [])
    wanted = [
        "scale of embed: 2.0",
        "offset of rms_norm: 1.0",
        "soft_cap of attention: 50.0",
        "scale of logits: 0.5",
        "soft_cap of logits: 30.0",
        "rope of 4 in 8 elements",
        "scale 0.25 of attention",
        "activation 'gelu_tanh' of gated_activation",
    ]
    assert len(found) == len(wanted)
    for text, problem in zip(wanted, found, strict=True):
        assert text in problem
