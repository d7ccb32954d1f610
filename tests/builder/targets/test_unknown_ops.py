"""An op that a target does not lower is refused by its name, with all others, before anything is compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

import pytest

from llmserve.builder.options import BuildOptions
from llmserve.builder.pooling import POSITIONAL
from llmserve.builder.quantization import LINEAR_KINDS
from llmserve.builder.reference import OPERATIONS
from llmserve.builder.resolve import resolve_network, target_for
from llmserve.errors import RecipeError
from llmserve.models.graph import Op, OpKind, Program
from llmserve.models.registry import architecture_for
from llmserve.models.spec import Architecture
from tests.checkpoints import KINDS

TARGETS: Mapping[str, Mapping[str, Any]] = {"cpu": {}, "cuda": {"gpu": "sm_90"}, "tensorrt_llm": {}}
OPTIONS = BuildOptions(dtype="float16", max_seq_len=96)


class Later(Enum):
    """Kinds that nobody knows yet."""

    SCAN = "scan"
    CONVOLVE = "convolve"


def with_later_ops(program: Program) -> Program:
    """And an attribute that nobody knows."""
    embed, *rest, logits = program.ops
    x = embed.output
    later: list[Any] = [Op(kind, (x,), kind.value, embed.width) for kind in Later]  # type: ignore[arg-type]
    logits = replace(logits, attrs={**logits.attrs, "bias": 0.5})
    return replace(program, ops=(embed, *later, *later, *rest, logits))


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_refuses_all_of_them_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: Callable[..., Program] = Architecture.program
    monkeypatch.setattr(Architecture, "program", lambda self, spec: with_later_ops(made(self, spec)))
    with pytest.raises(RecipeError) as caught:
        resolve_network(KINDS["llama"], replace(OPTIONS, target=name, given=TARGETS[name]))
    for text in ("op scan", "op convolve", "bias of logits: 0.5"):
        assert str(caught.value).count(text) == 1


@pytest.mark.parametrize("name", ["cuda", "tensorrt_llm"])
def test_mixtures_of_experts_are_refused_by_name(name: str) -> None:
    with pytest.raises(RecipeError) as caught:
        resolve_network(KINDS["qwen2-moe"], replace(OPTIONS, target=name, given=TARGETS[name]))
    for text in ("op route", "op experts"):
        assert str(caught.value).count(text) == 1


def test_tensorrt_llm_refuses_queries_that_grow_by_name() -> None:
    with pytest.raises(RecipeError, match="op scale_by_position"):
        resolve_network(KINDS["ministral3"], replace(OPTIONS, target="tensorrt_llm"))


@pytest.mark.parametrize(
    ("kind", "texts", "texts_of_tensorrt_llm"),
    [
        ("llama4-moe", ("chunked of attention: True", "op experts"), ("op scale_by_position",)),
        ("qwen3.5-moe", ("op experts",), ("op convolution", "op delta_rule", "op sigmoid_gate")),
        ("granite4-h-moe", ("op experts",), ("op selective_scan",)),
        ("nemotron-h-moe", ("op experts",), ("op activation", "own_weights of rms_norm: True")),
        ("gemma4-moe", ("op route", "op experts"), ("op scale",)),
        ("phimoe", ("biased of logits: True", "op route"), ("op layer_norm",)),
        ("lfm2-moe", ("op experts",), ("op convolution", "op multiply")),
        ("granite-swa", ("sinks of attention: True",), ()),
    ],
)
@pytest.mark.parametrize("name", ["cuda", "tensorrt_llm"])
def test_what_only_the_cpu_has_is_refused_by_name(
    name: str, kind: str, texts: tuple[str, ...], texts_of_tensorrt_llm: tuple[str, ...]
) -> None:
    """`texts_of_tensorrt_llm`: what only that target refuses."""
    with pytest.raises(RecipeError) as caught:
        resolve_network(KINDS[kind], replace(OPTIONS, target=name, given=TARGETS[name]))
    for text in texts:
        assert str(caught.value).count(text) == 1
    for text in texts_of_tensorrt_llm:
        assert str(caught.value).count(text) == (name == "tensorrt_llm")


@pytest.mark.parametrize("name", TARGETS)
def test_the_ops_of_today_are_known(name: str) -> None:
    architecture, options = architecture_for(KINDS["llama"]), replace(OPTIONS, given=TARGETS[name])
    spec = architecture.from_hf(KINDS["llama"])
    target = target_for(name, spec, KINDS["llama"])
    problems = target.problems(architecture.program(spec), architecture.params(spec), options)
    assert not [text for text in problems if "op " in text]


def test_the_reference_computes_every_kind() -> None:
    others = {OpKind.EMBED, OpKind.WITH_HIDDEN, OpKind.EXPERTS}
    assert {*others, *LINEAR_KINDS, *OPERATIONS, *POSITIONAL} == set(OpKind)
