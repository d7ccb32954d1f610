"""What ops become, what is fused, and that no value is overwritten while somebody still needs it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from llmserve.builder.options import BuildOptions
from llmserve.builder.quantization import quantized_params, rounded_tables
from llmserve.builder.targets.buffers import NO_BUFFER, Place
from llmserve.builder.targets.cpu.lowered import DeviceOp, Lowered
from llmserve.builder.targets.cpu.lowering import lower
from llmserve.engine.cpu.layout import NO_TENSOR, DType
from llmserve.engine.cpu.op_codes import LINEAR_CODES, Before, OpCode, RowsOf
from llmserve.models.graph import CacheShape, Graph, Program
from llmserve.models.number_formats import INT4, QUANTIZED
from llmserve.models.spec import Param
from tests.engine.cpu.networks import Network, odd_network


def lowered(network: Network, quantization: str = "") -> Lowered:
    names = quantized_params(network.program, network.params, BuildOptions(quantization=quantization))
    return lower(network.program, network.params, dtype=DType.FLOAT16, quantized=names)


def traced(graph: Graph, **shapes: tuple[int, ...]) -> Network:
    return Network(graph.program(), {name: np.zeros(shape, np.float32) for name, shape in shapes.items()})


def graph(vocab: int = 8) -> Graph:
    return Graph(CacheShape(1, 1, 4), vocab)


def counts(result: Lowered) -> Counter[OpCode]:
    return Counter(op.code for op in result.ops)


def test_every_op_of_a_layer() -> None:
    assert counts(lowered(odd_network())) == {
        OpCode.EMBED: 1,
        OpCode.RMS_NORM: 4 * 3 + 1,
        OpCode.LINEAR: 4 * 3 + 1,
        OpCode.ROPE_TABLE: 1,  # the same frequencies in every layer
        OpCode.CACHE_WRITE: 3,
        OpCode.ATTENTION: 3,
        OpCode.GATED_SILU: 3,
        OpCode.SELECT_ROWS: 1,
    }


def test_what_few_networks_have_is_an_op_of_its_own_or_a_field() -> None:
    """Scales and soft caps of whole rows work in place; a norm's offset goes into the weights."""
    result = lowered(odd_network(peculiar=True))
    ops = counts(result)
    assert (ops[OpCode.GATED_GELU], ops[OpCode.GATED_GELU_TANH], ops[OpCode.GATED_SILU]) == (1, 1, 1)
    assert (ops[OpCode.ROPE_TABLE], ops[OpCode.SCALE], ops[OpCode.SOFT_CAP]) == (2, 2, 1)
    assert [op.code for op in result.ops[-3:]] == [OpCode.LINEAR, OpCode.SCALE, OpCode.SOFT_CAP]
    assert len({op.output for op in result.ops[-3:]}) == 1
    assert sorted(op.output.width for op in result.ops if op.code is OpCode.ROPE_TABLE) == [6, 10]
    assert {op.fields["soft_cap"] for op in result.ops if op.code is OpCode.ATTENTION} == {1.5}
    assert result.offsets == dict.fromkeys((name for name in result.offsets if "norm" in name), 0.5)
    assert len(result.offsets) == ops[OpCode.RMS_NORM]
    before = [op.fields.get("before") for op in lowered(odd_network(peculiar=True), "int8").ops]
    assert {Before.GATED_GELU, Before.GATED_GELU_TANH, Before.GATED_SILU} <= set(before)


def test_additions_of_residuals_are_part_of_the_linear_layers() -> None:
    residuals = [
        op for op in lowered(odd_network()).ops if op.code is OpCode.LINEAR and op.inputs[1].buffer != NO_BUFFER
    ]
    assert len(residuals) == 2 * 3
    assert all(op.inputs[1] == op.output for op in residuals), "the residual stream stays in its place"


def test_a_sum_of_two_uses_of_one_linear_layer_is_not_fused() -> None:
    g = graph()
    x = g.embed("embed", 8)
    y = g.linear(x, "w", 8)
    g.logits(g.select_rows(g.add(y, y)), "embed")
    result = lowered(traced(g, embed=(8, 8), w=(8, 8)))
    assert counts(result)[OpCode.ADD] == 1
    add = next(op for op in result.ops if op.code is OpCode.ADD)
    assert add.inputs[0] == add.inputs[1]


def test_slices_are_views_and_the_attention_turns_queries_and_keys() -> None:
    result = lowered(odd_network())
    table = next(op.output for op in result.ops if op.code is OpCode.ROPE_TABLE)
    attentions = [op for op in result.ops if op.code is OpCode.ATTENTION]
    writes = [op for op in result.ops if op.code is OpCode.CACHE_WRITE]
    assert len(attentions) == len(writes) == 3
    assert all(op.inputs[1] == table for op in attentions)
    assert all(op.inputs[2] == table for op in writes)
    norms = [op for op in result.ops if op.code is OpCode.RMS_NORM and op.fields["groups"] > 1]
    written = next(op for op in result.ops if op.code is OpCode.CACHE_WRITE)
    assert written.inputs[1] == Place(written.inputs[1].buffer, 80, 20, 100)
    assert all(op.inputs[0].stride == 100 for op in norms)


def test_a_value_that_is_read_later_is_not_overwritten() -> None:
    """Both the input and the output of the norm are read afterwards; so is a slice that overlaps another one."""
    g = graph()
    x = g.embed("embed", 8)
    left, all_of_it = g.slice(x, 0, 4), g.slice(x, 0, 8)
    first = g.rms_norm(left, "first", eps=1e-5)
    second = g.rms_norm(all_of_it, "second", eps=1e-5)
    g.logits(g.select_rows(g.add(second, g.linear(first, "w", 8))), "embed")
    result = lowered(traced(g, embed=(8, 8), first=(4,), second=(8,), w=(8, 4)))
    norm = next(op for op in result.ops if op.code is OpCode.RMS_NORM)
    assert not norm.output.overlaps(norm.inputs[0])


def test_quantized_layers_quantize_their_input_first() -> None:
    network = odd_network()
    result = lowered(network, "int8")
    assert counts(result)[OpCode.LINEAR_INT8] == counts(result)[OpCode.QUANTIZE] == 13
    assert counts(result)[OpCode.LINEAR] == counts(result)[OpCode.GATED_SILU] == 0
    assert counts(result)[OpCode.RMS_NORM] == 2 * 3, "of queries and keys; the others are part of the quantization"
    by_name = {tensor.name: tensor for tensor in result.tensors}
    assert by_name["0.qkv"].dtype is DType.INT8
    groups = by_name["0.qkv.groups"]  # 100 outputs are four panels, 42 inputs two groups
    assert (groups.dtype, groups.rows, groups.cols) == (DType.FLOAT16, 4 * 2, 32)
    assert (by_name["0.qkv.row_scale"].dtype, by_name["0.qkv.row_scale"].cols) == (DType.FLOAT32, 100)
    assert by_name["embed"].dtype is DType.FLOAT16
    assert by_name["norm"].dtype is DType.FLOAT32


def test_rows_that_make_values_have_eight_bits_beside_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(QUANTIZED, "int4", replace(INT4, most_bits=9.0))
    network = odd_network()
    result = lowered(network, "int4")
    of_layer = [op for op in result.ops if op.code in (OpCode.LINEAR_INT4, OpCode.LINEAR_INT8)][:3]
    tensors = [[result.tensors[index].name for index in op.tensors] for op in of_layer]
    assert tensors == [
        [f"0.{part}" for part in ("qkv[0:80]", "qkv_bias[0:80]", "qkv[0:80].groups", "qkv[0:80].row_scale")],
        [f"0.{part}" for part in ("qkv[80:100]", "qkv_bias[80:100]", "qkv[80:100].groups", "qkv[80:100].row_scale")],
        ["0.out", result.tensors[NO_TENSOR].name, "0.out.groups", "0.out.row_scale"],
    ]
    assert counts(result)[OpCode.QUANTIZE] == 13, "both products read the same integers"
    left, right = of_layer[0].output, of_layer[1].output
    assert (left.width, right.width, right.offset) == (80, 20, left.offset + 80)
    assert [(rows.tensor, rows.begin, rows.end) for rows in result.stored["0.qkv"]] == [
        ("0.qkv[0:80]", 0, 80), ("0.qkv[80:100]", 80, 100)
    ]  # fmt: skip


def test_a_tied_embedding_is_not_quantized() -> None:
    g = graph()
    g.logits(g.select_rows(g.embed("embed", 8)), "embed")
    param = Param("embed", (8, 8), ("embed",), ((8, 8),), quantizable=True)
    assert quantized_params(g.program(), [param], BuildOptions(quantization="int8")) == {}


def test_a_tied_head_is_stored_once() -> None:
    g = graph()
    g.logits(g.select_rows(g.embed("embed", 8)), "head")
    params = [Param(name, (8, 8), ("embedding",), ((8, 8),), quantizable=name == "head") for name in ("embed", "head")]
    for quantization, names in (("", {"embed"}), ("int8", {"embed", "embed.groups", "embed.row_scale"})):
        heads = quantized_params(g.program(), params, BuildOptions(quantization=quantization))
        quantized = {**heads, **rounded_tables(g.program(), params, heads)}
        result = lower(g.program(), params, dtype=DType.FLOAT16, quantized=quantized)
        assert {tensor.name for tensor in result.tensors} == names
        assert result.num_quantized == bool(quantization)
    result = lower(g.program(), params, dtype=DType.FLOAT16, quantized=heads)  # for a target that rounds no tables
    assert {tensor.name for tensor in result.tensors} == {"embed", "head", "head.groups", "head.row_scale"}


def test_equal_constants_are_stored_once() -> None:
    constants = lowered(odd_network(alibi=True)).constants
    assert list(constants) == ["alibi_slopes.0"]


def test_ops_after_select_rows_work_on_the_selected_rows() -> None:
    result = lowered(odd_network(), "int8")
    first = next(i for i, op in enumerate(result.ops) if op.code is OpCode.SELECT_ROWS)
    of_tokens, of_selected = [RowsOf.TOKENS] * first, [RowsOf.SELECTED] * (len(result.ops) - first)
    assert [op.rows for op in result.ops] == of_tokens + of_selected


def reads_and_writes(op: DeviceOp) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    if op.code is OpCode.QUANTIZE:
        return op.inputs[:1], (op.output, op.inputs[1])
    return op.inputs, (op.output,)


@pytest.mark.parametrize("quantization", ["", "int8", "int4"])
@pytest.mark.parametrize("alibi", [False, True])
def test_matrix_products_never_write_what_they_read(alibi: bool, quantization: str) -> None:
    """Threads read all of the input while others already write; only the residual may be the output itself."""
    for op in lowered(odd_network(alibi=alibi), quantization).ops:
        if op.code not in (*LINEAR_CODES, OpCode.ATTENTION, OpCode.QUANTIZE, OpCode.SELECT_ROWS):
            continue
        reads, writes = reads_and_writes(op)
        sources = (reads[0], *reads[2:])
        assert not any(w.buffer == r.buffer for w in writes for r in sources if r.buffer != NO_BUFFER)


def test_buffers_are_reused() -> None:
    """Three layers need no more room than one."""
    network = odd_network()
    result = lowered(network)
    assert len(result.buffers) <= 5
    assert sum(result.buffers) < 4 * (100 + 74 + 60 + 42 + 42 + 64)


def test_lowering_is_repeatable() -> None:
    records = [lowered(odd_network(), "int8").op_records().tobytes() for _ in range(2)]
    assert records[0] == records[1]


def test_logits_alone() -> None:
    g = graph()
    g.logits(g.select_rows(g.embed("embed", 8)), "head")
    program: Program = g.program()
    result = lowered(traced(g, embed=(8, 8), head=(8, 8)))
    assert [op.code for op in result.ops] == [OpCode.EMBED, OpCode.SELECT_ROWS, OpCode.LINEAR]
    assert program.ops[-1].output
