from __future__ import annotations

from dataclasses import replace

import pytest

from llmserve.builder.options import BuildOptions


def test_the_defaults_are_valid() -> None:
    assert BuildOptions().problems() == []


def test_every_problem_is_found_at_once() -> None:
    wrong = BuildOptions(
        dtype="fp16", quantization="int3", max_batch_size=0, max_num_tokens=0, max_seq_len=-1, tokens_per_block=24
    )
    assert len(wrong.problems()) == 6


@pytest.mark.parametrize("block", [0, -2, 3, 48])
def test_blocks_are_powers_of_two(block: int) -> None:
    (problem,) = replace(BuildOptions(), tokens_per_block=block).problems()
    assert "power of two" in problem


def test_a_sequence_has_room_for_a_prompt_and_an_answer() -> None:
    assert replace(BuildOptions(), max_seq_len=1).problems() != []
    assert replace(BuildOptions(), max_seq_len=2).problems() == []


@pytest.mark.parametrize(
    ("values", "what_to_write"),
    [
        ({"dtype": "int8"}, "got 'int8'; write --dtype float16 --quantization int8"),
        ({"dtype": "INT4"}, "got 'INT4'; write --dtype float16 --quantization int4"),
        ({"dtype": "w8a8"}, "got 'w8a8'; write --dtype float16 --quantization int8"),
        ({"dtype": "fp8"}, "no engine supports fp8; the nearest is --dtype float16 --quantization int8"),
        ({"dtype": "nvfp4"}, "no engine supports nvfp4; the nearest is --dtype float16 --quantization int4"),
        ({"dtype": "bf16"}, "got 'bf16'; write --dtype bfloat16"),
        ({"quantization": "w8a8"}, "got 'w8a8'; write --quantization int8"),
        ({"quantization": "int4_awq"}, "no engine supports int4_awq; the nearest is --quantization int4"),
        ({"quantization": "float16"}, "got 'float16'; write --dtype float16 and leave --quantization out"),
        ({"kv_cache_dtype": "fp8"}, "no engine supports fp8; the nearest is --kv-cache-dtype int8"),
        ({"kv_cache_dtype": "fp16"}, "got 'fp16'; write --kv-cache-dtype float16"),
        ({"kv_cache_dtype": "bfloat16"}, "write --kv-cache-dtype float16, or change --dtype"),
        ({"kv_cache_dtype": "int4"}, "no engine supports int4; the nearest is --kv-cache-dtype int8"),
    ],
)
def test_another_name_of_a_number_format_says_what_to_write_instead(values: dict[str, str], what_to_write: str) -> None:
    (problem,) = BuildOptions(**values).problems()  # type: ignore[arg-type]
    assert problem.endswith(what_to_write)


def test_a_name_that_nobody_has_gets_no_advice() -> None:
    assert BuildOptions(dtype="float7").problems() == ["dtype must be one of float16, bfloat16, float32, got 'float7'"]


def test_what_belongs_to_another_target_is_refused_reported_or_understood() -> None:
    given = {"tp_size": 2, "gemm_plugin": "float16", "use_weight_only": True, "workers": 1}
    options = BuildOptions.from_flat(given)
    assert options.problems() == [
        "tp_size 2 is for the tensorrt_llm target; leave it out, or build with --target tensorrt_llm"
    ]
    assert options.notes() == ["without effect on the cpu target: gemm_plugin float16"]
    assert options.quantization == "int8"
    own = BuildOptions.from_flat({**given, "target": "tensorrt_llm"})
    assert (own.problems(), own.notes()) == ([], [])


def test_calibration_data_without_anything_to_calibrate_is_refused() -> None:
    (problem,) = BuildOptions(calibration_data="a.jsonl").problems()
    assert problem.startswith("calibration_data has no effect without quantization")
    assert BuildOptions(calibration_data="a.jsonl", quantization="int8").problems() == []


def test_an_option_and_a_target_that_nobody_has_are_said_at_once() -> None:
    assert BuildOptions.from_flat({"target": "npu", "beams": 2}).problems() == [
        "target must be one of cpu, cuda, tensorrt_llm, got 'npu'",
        "no target has an option beams",
    ]


def test_only_what_decides_the_engine_is_kept() -> None:
    cpu = BuildOptions.from_flat({"workers": 3, "gemm_plugin": "float16"}).as_dict()
    assert cpu == BuildOptions().as_dict()
    assert BuildOptions(calibration_data="a.jsonl").as_dict() == cpu
    assert cpu.keys() == {
        "dtype", "quantization", "kv_cache_dtype", "max_batch_size", "max_num_tokens", "max_seq_len",
        "tokens_per_block", "target",
    }  # fmt: skip
    gpu = BuildOptions.from_flat({"target": "tensorrt_llm", "workers": 3, "tp_size": 2}).as_dict()
    assert gpu["tensorrt_llm"]["tp_size"] == 2
    assert "workers" not in gpu["tensorrt_llm"]
