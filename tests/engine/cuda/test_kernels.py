"""Every kernel compiles for every architecture, spills nothing, and leaves room for as many warps as it was to.

Of kernels that differ only in the network's sizes, the largest stands for all, and for one architecture the smallest
beside it: `make cuda-kernels` compiles them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from llmserve.builder.targets.cuda import compiler
from llmserve.builder.targets.cuda.compiler import TritonCompiler
from llmserve.engine.cuda.layout import Kernel
from llmserve.errors import InternalError
from tests.engine.cuda.compiled_before import CompiledBefore
from tests.engine.cuda.engines import peculiar_kernels
from tests.engine.cuda.intermediate import reduced_sizes
from tools.benchmark.hybrids import HYBRIDS
from tools.cuda_kernels import (
    ARCHITECTURES,
    PRECISIONS,
    RESERVED_SHARED_BYTES,
    SHARED_BYTES,
    Row,
    csv_table,
    distinct,
    kernels_of,
    rows,
    summary,
)

FUNCTIONS = {
    "choosing.count_history", "choosing.penalize", "choosing.add_bias", "choosing.ban", "choosing.find_peaks",
    "choosing.choose_best", "drawing.weigh", "drawing.list_blocks", "drawing.draw_filtered", "drawing.draw",
    "attention.attention", "attention.attention_segments", "attention.merge_and_round", "attention.merge_segments",
    "attention.turn", "attention.turn_and_write", "attention.write_cache", "attention_int8.round_queries",
    "attention_int8.write_cache", "linear.add_gated_segments", "linear.add_normed_segments",
    "linear.add_rounded_segments", "linear.add_segments", "linear.gated_linear", "linear.linear",
    "linear.linear_segments", "linear.words_segments", "rowwise.add",
    "rowwise.embed", "rowwise.gated_activation", "rowwise.rms_norm", "rowwise.round_rows", "rowwise.select_rows",
    "rowwise.rounded_rms_norm", "rowwise.multiply", "rowwise.sigmoid_gate", "states.convolution",
    "states.delta_rule", "states.keep_rows", "states.selective_scan", "rowwise.activation",
    "rowwise.norm_by_columns", "rowwise.scale", "rowwise.scale_by_position",
    "streams.embed_known", "streams.mix", "streams.over_threshold", "streams.spread",
}  # fmt: skip


SIZES = ("NUM_", "STRIDE", "WIDTH", "MAX_ROWS", "SEGMENTS")  # parts of the constants that follow from a network
BOTH_SIZES = "sm_90"


def largest(kernels: Iterable[Kernel], *others: str, smallest: bool = False) -> list[Kernel]:
    """One of those that differ only in sizes, in how far a window reaches, and in constants with `others` in their
    names."""

    def size(kernel: Kernel) -> int:
        return sum(value for _, value in kernel.constants if isinstance(value, int))

    def common(kernel: Kernel) -> Kernel:
        constants = [
            (name, value > 0 if name == "WINDOW" else value)  # type: ignore[operator]
            for name, value in kernel.constants
            if not any(part in name for part in (*SIZES, *others))
        ]
        found = replace(kernel, constants=tuple(constants))
        return replace(found, num_warps=1, num_stages=1) if "TILE" in others else found

    ordered = sorted(kernels, key=size, reverse=smallest)
    return list({common(kernel): kernel for kernel in ordered}.values())


@pytest.fixture(scope="module")
def triton() -> Iterator[CompiledBefore]:
    compiler = CompiledBefore()
    yield compiler
    compiler.close()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_networks_of_real_shape_fit_every_architecture(architecture: str, triton: CompiledBefore) -> None:
    """One with everything that is usual, and the layers with states of others."""
    kernels = distinct(["Qwen3-0.6B", *HYBRIDS])
    chosen = {*largest(kernels), *(largest(kernels, smallest=True) if architecture == BOTH_SIZES else ())}
    kernels = {kernel: where for kernel, where in kernels.items() if kernel in chosen}
    found = list(rows(kernels, [architecture], triton))
    assert {row.architecture for row in found} == {architecture}
    assert [problem for row in found for problem in row.problems] == []


def test_kernels_that_few_networks_have_compile_too(triton: CompiledBefore) -> None:
    """Soft caps, windows, ALiBi, tanh, erf, odd widths, bfloat16. Between them the tests see every kernel there is."""
    strides = (("TILE_COLUMNS", 512), ("WIDTH", 384), ("X_STRIDE", 768), ("Y_STRIDE", 384))
    of_two_formats = Kernel(  # of gates and ups in more formats than one
        "rowwise.gated_activation", (("x", "*bf16"), ("y", "*bf16")), (), (("ACTIVATION", "silu"), *strides), 4, 3
    )
    kernels = [*largest(peculiar_kernels("bfloat16"), "TILE"), of_two_formats]  # the other tests have all tiles
    compiled = list(triton.compile(kernels, "sm_90", 2))
    assert all(each.num_arguments == len(kernel.types) + 2 for each, kernel in zip(compiled, kernels, strict=True))
    real = [kernel for precision in PRECISIONS for kernel in kernels_of("Qwen3-0.6B", precision)]
    assert {kernel.function for kernel in [*kernels, *real]} == FUNCTIONS


@pytest.mark.parametrize(("architecture", "precision"), [("sm_90", "float16"), ("sm_80", "int4"), ("sm_100", "int8")])
def test_what_may_be_tried_instead_compiles_too(architecture: str, precision: str, triton: CompiledBefore) -> None:
    """That nothing of it spills nobody asks: time tells."""
    usual = kernels_of("Qwen3-0.6B", precision)
    others = [kernel for kernel in kernels_of("Qwen3-0.6B", precision, with_tactics=True) if kernel not in usual]
    others = largest(others)
    assert len(others) >= 8
    for compiled in triton.compile(others, architecture, 2):
        assert compiled.shared_bytes <= SHARED_BYTES[architecture] * 1024 - RESERVED_SHARED_BYTES


@pytest.mark.parametrize("function", ["rowwise.rms_norm", "linear.add_normed_segments"])
def test_a_norm_adds_up_pairs(function: str) -> None:
    """The order within a longer sum follows from a layout, which differs between these two."""
    kernel = next(kernel for kernel in kernels_of("Baichuan2-7B", "float16") if kernel.function == function)
    assert reduced_sizes(kernel, "sm_90") == {2}


def test_two_compilations_give_the_same_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """Without what Triton remembers of the first."""
    kernel = kernels_of("Qwen3-0.6B")[:1]
    found = []
    for folder in ("one", "two"):
        monkeypatch.setenv("TRITON_CACHE_DIR", f"{tmp_path}/{folder}")
        found += [each.binary for each in TritonCompiler().compile(kernel, "sm_80", 1)]
    assert found[0] == found[1]
    assert b".py" not in found[0]


def test_what_the_environment_says_to_the_compiler_does_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    kernel = kernels_of("Qwen3-0.6B")[:1]
    found = []
    for number, value in enumerate(("0", "1")):
        monkeypatch.setenv("TRITON_CACHE_DIR", f"{tmp_path}/{number}")
        monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", value)
        monkeypatch.setenv("TRITON_INTERPRET", value)
        monkeypatch.setenv("TRITON_DISABLE_PTXAS_OPT", value)
        found += [each.binary for each in TritonCompiler().compile(kernel, "sm_80", 1)]
    assert found[0] == found[1]


def test_a_spill_and_too_few_warps_are_problems() -> None:
    kernel = kernels_of("Qwen3-0.6B")[0]
    row = Row("x", "float16", kernel, "sm_80", compiler.Compiled(b"", "embed", 128, 0, 5, 200, 8))
    assert row.problems == [
        "embed of x in float16 for sm_80 spills 8 bytes",
        "embed of x in float16 for sm_80 leaves room for 8 warps, not 24",
    ]  # fmt: skip


def test_a_kernel_with_other_parameters_is_an_error_of_ours() -> None:
    wrong = Kernel("rowwise.add", (("a", "*fp32"),), (), (("WIDTH", 4),), 1, 1)
    with pytest.raises(InternalError, match=r"rowwise.add has the parameters \['A_STRIDE'"):
        list(TritonCompiler().compile([wrong], "sm_90", 1))


def test_arguments_in_another_order_are_an_error_of_ours() -> None:
    """A launch passes them by place."""
    kernel = next(kernel for kernel in kernels_of("Qwen3-0.6B") if kernel.function == "rowwise.embed")
    with pytest.raises(InternalError, match=r"rowwise.embed has the parameters"):
        list(TritonCompiler().compile([replace(kernel, types=kernel.types[::-1])], "sm_90", 1))


def test_a_kernel_that_spills_is_compiled_again_with_more_registers(triton: CompiledBefore) -> None:
    """Left to itself, ptxas gives this one 48 and spills."""
    tile = {("TILE_ROWS", 16), ("NUM_COLUMNS", 12288)}
    kernels = [kernel for kernel in kernels_of("Baichuan2-7B") if tile <= {*kernel.constants}]
    (compiled,) = triton.compile(kernels, "sm_120", 1)
    assert (compiled.registers, compiled.spilled_bytes) == (54, 0)


@pytest.mark.parametrize("head_dim", [256, 512])
@pytest.mark.parametrize("precision", ["float16", "float16+kv-int8"])
def test_attention_over_wide_heads_fits_every_architecture(
    precision: str, head_dim: int, triton: CompiledBefore
) -> None:
    kernels = kernels_of("Qwen3-0.6B", precision, head_dim=head_dim)
    named = {kernel: ("x", precision) for kernel in kernels if kernel.function.startswith("attention.attention")}
    found = list(rows(named, ARCHITECTURES, triton))
    assert len(found) == 2 * len(ARCHITECTURES)
    assert [problem for row in found for problem in row.problems] == []
    for row in found:
        assert row.compiled.shared_bytes <= SHARED_BYTES[row.architecture] * 1024 - RESERVED_SHARED_BYTES


@pytest.mark.parametrize(("num_kv_heads", "expected"), [(8, 16), (1, 32)])
def test_a_tile_has_room_for_all_heads_that_share_keys(num_kv_heads: int, expected: int) -> None:
    kernels = kernels_of("Qwen3-0.6B", "float16+kv-int8", num_attention_heads=32, num_key_value_heads=num_kv_heads)
    found = {value for kernel in kernels for name, value in kernel.constants if name == "TILE_QUERIES"}
    assert found == {expected}


def test_more_tensor_memory_than_there_is_becomes_an_error() -> None:
    """The compiler makes a trap of it, and says nothing."""
    kernels = kernels_of("Qwen3-0.6B", "float16+kv-int8", head_dim=256)
    kernel = next(kernel for kernel in kernels if kernel.function == "attention.attention_segments")
    more = tuple((name, 64 if name in ("TILE_QUERIES", "TILE_KEYS") else value) for name, value in kernel.constants)
    with pytest.raises(InternalError, match="attention_segments wants 576 columns of tensor memory, of 512"):
        list(TritonCompiler().compile([replace(kernel, constants=more)], "sm_100", 1))


def test_the_summary_has_the_extremes_of_each_kernel() -> None:
    kernel = kernels_of("Qwen3-0.6B")[0]
    found = [
        Row("x", "float16", kernel, architecture, compiler.Compiled(b"", "embed", 128, shared, 5, registers, 0))
        for architecture, registers, shared in (("sm_80", 40, 2048), ("sm_90", 200, 1024))
    ]
    data = csv_table(found)
    assert len(data.splitlines()) == 3
    assert f"| {found[0].name} | 2 | 200 | 2.0 | 0 | {found[1].warps} |" in summary(data)
