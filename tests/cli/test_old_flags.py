"""Command lines of TensorRT-LLM's programs: each flag is honoured, named as without effect, or refused with advice."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from llmserve.cli.app import app
from llmserve.cli.main import main
from llmserve.cli.old_flags import OldFlags
from llmserve.cli.trtllm_flags import BUILD, RUN, SUMMARIZE
from tests.checkpoints import make_checkpoint

COMMANDS: Any = typer.main.get_command(app)
# what the scripts have: build.py of 0.5 to 0.8, then convert_checkpoint.py and trtllm-build
BUILD_PY = """
world_size model_dir bin_model_dir model_version dtype logits_dtype timing_cache log_level vocab_size n_layer
n_positions n_embd n_head inter_size hidden_act max_batch_size max_input_len max_output_len max_beam_width
use_gpt_attention_plugin use_gemm_plugin enable_context_fmha enable_context_fmha_fp32_acc multi_block_mode
parallel_build visualize enable_debug_output gpus_per_node output_dir remove_input_padding use_smooth_quant per_channel
per_token int8_kv_cache enable_fp8 fp8_kv_cache quantized_fp8_model_path use_weight_only weight_only_precision
use_inflight_batching paged_kv_cache tokens_per_block max_num_tokens strongly_typed per_group use_rmsnorm_plugin
profiling_verbosity quant_ckpt_path tp_size pp_size workers max_prompt_embedding_table_size calibrate_kv_cache
smoothquant group_size checkpoint_dir model_config build_config model_cls_file model_cls_name max_seq_len opt_num_tokens
max_encoder_input_len kv_cache_type input_timing_cache output_timing_cache strip_plan weight_sparsity weight_streaming
fast_build visualize_network dry_run monitor_memory gather_context_logits gather_generation_logits
gather_all_token_logits lora_dir lora_ckpt_source lora_target_modules max_lora_rank speculative_decoding_mode
max_draft_len auto_parallel cluster_key gemm_plugin gpt_attention_plugin context_fmha multiple_profiles reduce_fusion
"""
RUN_PY = """
max_output_len log_level engine_dir use_py_session input_text input_file max_input_length tokenizer_dir tokenizer_type
vocab_file num_beams output_csv output_npy output_logits_npy temperature top_k top_p length_penalty repetition_penalty
presence_penalty frequency_penalty early_stopping debug_mode no_add_special_tokens streaming streaming_interval
prompt_table_path prompt_tasks lora_dir lora_task_uids num_prepend_vtokens run_profiling max_attention_window_size
sink_token_length model_version random_seed stop_words bad_words max_kv_cache_length no_prompt_template
"""
SUMMARIZE_PY = """
hf_model_dir hf_model_location tokenizer_dir vocab_file test_hf test_trt_llm data_type engine_dir use_py_session
eval_task eval_ppl check_accuracy tensorrt_llm_rouge1_threshold tensorrt_llm_ppl_threshold dataset_path output_dir
batch_size max_ite output_len max_input_length max_attention_window_size max_kv_cache_length sink_token_length num_beams
temperature top_k top_p length_penalty repetition_penalty presence_penalty frequency_penalty early_stopping debug_mode
no_add_special_tokens hf_device_map_auto log_level model_version num_prepend_vtokens
"""


@pytest.mark.parametrize(
    ("name", "table", "flags"),
    [("build", BUILD, BUILD_PY), ("run", RUN, RUN_PY), ("eval", SUMMARIZE, SUMMARIZE_PY)],
)
def test_every_flag_has_an_answer(name: str, table: OldFlags, flags: str) -> None:
    ours = {flag for each in COMMANDS.commands[name].params for flag in each.opts}
    asked = [flag.replace("_", "-") for flag in flags.split()]
    assert [flag for flag in asked if flag not in table.takes and f"--{flag}" not in ours] == []


@pytest.mark.parametrize(("name", "table"), [("build", BUILD), ("run", RUN), ("eval", SUMMARIZE)])
def test_what_a_flag_becomes_is_ours(name: str, table: OldFlags) -> None:
    ours = {flag for each in COMMANDS.commands[name].params for flag in each.opts}
    words = [row.becomes.split()[:1] for row in table.rows.values() if row.becomes]
    assert {word for one in words for word in one if word.startswith("--")} <= ours


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        ("--use_gemm_plugin float16 --dtype float16", "--gemm-plugin float16 --dtype float16"),
        ("--use_gemm_plugin --dtype float16", "--gemm-plugin auto --dtype float16"),
        ("--use_gemm_plugin=bfloat16", "--gemm-plugin bfloat16"),
        ("--remove_input_padding", "--remove-input-padding enable"),
        ("--remove_input_padding disable", "--remove-input-padding disable"),
        ("--paged_kv_cache", "--kv-cache-type paged"),
        ("--paged_kv_cache enable", "--kv-cache-type paged"),
        ("--paged_kv_cache=disable", "--kv-cache-type continuous"),
        ("--paged_kv_cache tests", "--kv-cache-type paged tests"),  # a path that exists
        ("--weight_only_precision --use_weight_only", "--weight-only-precision int8 --use_weight_only"),
        ("--world_size 2", "--tp-size 2"),
        ("-sq 0.5 --per_token --per_channel", "--quantization int8"),
        ("--model_version v2_7b x", "x"),
        ("-- --model_version", "-- --model_version"),
    ],
)
def test_translation(given: str, becomes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    done = BUILD.translate(given.split())
    assert (" ".join(done.arguments), done.problems) == (becomes, [])


def test_what_has_no_effect_is_one_list_by_reason() -> None:
    done = BUILD.translate(
        ["--model_version", "v2_7b", "--log_level", "info", "--n_layer", "2", "--max_draft_len", "0"]
    )
    assert done.arguments == []
    assert [text.split(" (")[0] for text in done.without_effect] == [
        "--model_version, --n_layer", "--log_level", "--max_draft_len",
    ]  # fmt: skip


def llmserve(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["llmserve", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def test_all_that_is_wrong_with_a_command_line_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--enable_fp8 --fp8_kv_cache --lora_target_modules a b --max_bach_size 3 --max_batch_size x --qqq"
    assert llmserve(monkeypatch, "build", "x", *flags.split()) == 2
    shown = capsys.readouterr().err
    assert "(6 problems)" in shown
    for part in (
        "--enable_fp8 is not supported; write --quantization int8 instead",
        "write --kv-cache-dtype int8",
        "no option --max_bach_size; did you mean --max-batch-size?",
        "--max_batch_size: ",
        "no option --qqq; llmserve build --help lists the options",
    ):
        assert part in shown
    assert llmserve(monkeypatch, "build", "x", "--use_gem_plugin") == 2
    assert "did you mean --use-gemm-plugin?" in capsys.readouterr().err


def test_both_lengths_of_build_py_are_the_longest_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = make_checkpoint(tmp_path / "tiny", "baichuan2-7b")  # made for 256 positions
    for flags, tokens in (
        ("--max_input_len 100 --max_output_len 28", 128),
        ("--max_output_len 10", 256),
        ("--max_output_len 10 --max_seq_len 64", 64),
    ):
        assert llmserve(monkeypatch, "build", "--hf_model_dir", checkpoint, "--dry-run", *flags.split()) == 0
        assert f"{tokens} tokens per sequence" in " ".join(capsys.readouterr().out.split())


def test_what_is_no_checkpoint_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert llmserve(monkeypatch, "build", "--model_dir", "baichuan-inc/Baichuan2-7B-Chat") == 2
    assert "or download it first: llmserve pull baichuan-inc/Baichuan2-7B-Chat" in capsys.readouterr().err
    assert llmserve(monkeypatch, "build", "no/such/folder") == 2
    assert "pull" not in capsys.readouterr().err
    (tmp_path / "manifest.json").write_text("{}")
    assert llmserve(monkeypatch, "build", "--checkpoint_dir", tmp_path) == 2
    assert "is already an engine" in capsys.readouterr().err


def test_convert_then_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The converted folder says what to build, and its options count where the second command gives none."""
    checkpoint, folder = make_checkpoint(tmp_path / "tiny", "baichuan2-7b"), tmp_path / "trt_ckpt" / "1-gpu"
    convert = ("convert_checkpoint", "--model_dir", checkpoint, "--dtype", "bfloat16", "--output_dir", folder)
    assert llmserve(monkeypatch, *convert) == 0
    assert f"llmserve build --checkpoint_dir {folder}" in capsys.readouterr().out
    assert llmserve(monkeypatch, "build", "--checkpoint_dir", folder, "--max_batch_size", "3", "--dry-run") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "bfloat16" in shown
    assert "3 sequences" in shown
    assert llmserve(monkeypatch, *convert, "--use_weight_only") == 0, "it may be written again"
    assert llmserve(monkeypatch, "build", "--model_dir", folder, "--dry-run", "--dtype", "float16") == 0
    assert "float16+int8" in capsys.readouterr().out


def test_a_converted_folder_names_the_checkpoint_as_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the cache of Hugging Face, a link has a name and what it leads to has a digest."""
    link, folder = tmp_path / "model", tmp_path / "converted"
    link.symlink_to(make_checkpoint(tmp_path / "9465e63a22ad", "baichuan2-7b"))
    assert llmserve(monkeypatch, "convert_checkpoint", "--model_dir", link, "--output_dir", folder) == 0
    assert f"checkpoint: {link}\n" in (folder / "recipe.yaml").read_text()


def test_convert_refuses_what_a_build_would_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = make_checkpoint(tmp_path / "tiny", "baichuan2-7b")
    folder = tmp_path / "converted"
    flags = ("--model_dir", checkpoint, "--output_dir", folder)
    assert llmserve(monkeypatch, "convert-checkpoint", *flags, "--dtype", "float15", "--max-batch-size", 0) == 2
    assert "dtype" in (error := capsys.readouterr().err)
    assert "max_batch_size" in error
    assert not folder.exists()
    assert llmserve(monkeypatch, "convert-checkpoint", "--model_dir", checkpoint, "--output_dir", checkpoint) == 2
    assert "already holds config.json" in capsys.readouterr().err
    (tmp_path / "recipe.yaml").write_text("dtype: float32\n")
    assert llmserve(monkeypatch, "convert-checkpoint", *flags, "--recipe", tmp_path / "recipe.yaml") == 0
    assert llmserve(monkeypatch, "build", folder, "--recipe", tmp_path / "recipe.yaml") == 2
    assert "two recipes" in capsys.readouterr().err
