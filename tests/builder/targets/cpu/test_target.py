"""The CPU target: refuses early, loads each parameter once, holds little, and rounds weights as it says."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray

from llmserve.builder.options import BuildOptions
from llmserve.builder.quantization import quantized_params
from llmserve.builder.targets.base import CompileJob
from llmserve.builder.targets.cpu.lowering import lower
from llmserve.builder.targets.cpu.target import CpuTarget
from llmserve.engine.cpu.layout import FORMAT_VERSION, DType
from llmserve.models.graph import Attr, CacheShape, Graph, OpKind
from llmserve.models.spec import Param
from tests.engine.cpu.networks import LIMITS, odd_network


def test_nothing_to_complain_about() -> None:
    network = odd_network()
    assert CpuTarget().problems(network.program, network.params, LIMITS) == []


def test_all_problems_of_the_options_at_once() -> None:
    network = odd_network()
    options = BuildOptions(dtype="float8", quantization="int3", max_batch_size=0, max_seq_len=0, tokens_per_block=0)
    found = CpuTarget().problems(network.program, network.params, options)
    assert len(found) == 5
    for word in ("float8", "int3", "max_batch_size", "max_seq_len", "tokens_per_block"):
        assert any(word in text for text in found)


def test_mixtures_of_experts_that_the_kernels_cannot_do() -> None:
    g = Graph(CacheShape(1, 1, 2), 8)
    x, shapes = g.embed("embed", 64), {"embed": (8, 64), "router": (4, 64), "head": (8, 64)}
    for layer, (inner, chosen) in enumerate(((40, 2), (48, 3))):
        routes = g.route(g.linear(x, "router", 4), experts_per_token=chosen, renormalize=False)
        x = g.experts(x, routes, f"{layer}.gate_up", f"{layer}.down", num_experts=4)
        shapes |= {f"{layer}.gate_up": (8 * inner, 64), f"{layer}.down": (4 * 64, inner)}
    g.logits(x, "head")
    params = [Param(name, shape, (name,), (shape,)) for name, shape in shapes.items()]
    found = CpuTarget().problems(g.program(), params, LIMITS)
    assert found == [
        "0.gate_up: each expert has 80 outputs, the cpu target needs a multiple of 32",
        "the cpu target supports only mixtures with equal numbers of experts, in total and per token",
    ]


def test_what_the_kernels_cannot_do() -> None:
    g = Graph(CacheShape(1, 4, 2), 8)
    x = g.embed("embed", 12)
    a = g.attention(x, g.slice(x, 0, 8), g.slice(x, 0, 8), layer=0, num_heads=6, num_kv_heads=4, head_dim=2, scale=1.0)
    g.logits(g.select_rows(g.gated_activation(a)), "head")
    program = g.program()
    unheard_of: dict[OpKind, dict[str, Attr]] = {
        OpKind.GATED_ACTIVATION: {"activation": "relu"},
        OpKind.ATTENTION: {"sink": 0.5},
    }
    ops = [dataclasses.replace(op, attrs={**op.attrs, **unheard_of.get(op.kind, {})}) for op in program.ops]
    found = CpuTarget().problems(dataclasses.replace(program, ops=tuple(ops)), [], LIMITS)
    assert len(found) == 3
    assert "the cpu target has no sink of attention: 0.5" in found
    assert any("support activation 'relu', only 'silu', 'gelu_tanh', 'gelu'" in text for text in found)
    assert any("not a multiple" in text for text in found)


@pytest.mark.parametrize("quantization", ["", "int8", "int4"])
def test_compile_loads_each_parameter_once_and_reports_every_byte(quantization: str, tmp_path: Path) -> None:
    network = odd_network()
    options = dataclasses.replace(LIMITS, dtype="bfloat16", quantization=quantization)
    loaded: Counter[str] = Counter()
    reported = 0

    def load(name: str) -> NDArray[Any]:
        loaded[name] += 1
        return network.load(name, "bfloat16")

    def advance(what: str, num_bytes: int) -> None:
        nonlocal reported
        reported += num_bytes

    facts = CpuTarget().compile(CompileJob(network.program, network.params, options, load, advance), tmp_path)
    assert loaded == dict.fromkeys(network.arrays, 1)
    quantized = quantized_params(network.program, network.params, options)
    tensors = lower(network.program, network.params, dtype=DType.BFLOAT16, quantized=quantized).tensors
    assert reported == sum(tensor.num_bytes for tensor in tensors)
    assert facts["isa"] == "any"
    assert facts["format_version"] == FORMAT_VERSION
    assert facts["quantized_params"] == (13 if quantization else 0)
    assert facts["operations"]["attention"] == 3
