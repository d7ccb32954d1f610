from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmserve.builder.calibration import encoder
from llmserve.builder.options import BuildOptions
from llmserve.cli.build import default_output_dir
from llmserve.cli.main import main
from llmserve.engine.directory.artifact import rebuild_command
from tests.checkpoints import make_checkpoint
from tests.gguf_files import make_gguf

# A build that halts after its first parameter: `llmserve build` with a target that waits.
HALTING = """
import sys, time
from llmserve.builder import resolve
from llmserve.cli.main import main
from tests.builder.fake_target import FakeTarget

def wait(name):
    print("compiling", flush=True)
    time.sleep(60)

resolve.target_for = lambda *_: FakeTarget(after_each=wait)
main()
"""

FLAGS = """
dtype quantization calibration-data lora drafting-layer kv-cache-dtype max-batch-size max-num-tokens max-seq-len
tokens-per-block target draft-vocabulary gpu tp-size pp-size max-input-len max-beam-width gemm-plugin
gpt-attention-plugin context-fmha remove-input-padding kv-cache-type use-weight-only weight-only-precision
workers parallel-build multiple-profiles reduce-fusion checkpoint-dir output-dir max-output-len
recipe dry-run kernels kernels-only prefix show-program help
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", "llama")


def llmserve(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["llmserve", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def test_a_gguf_file_is_built_served_and_not_taken_for_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = make_gguf(tmp_path / "m.gguf", "qwen3", stored="Q8_0", tokenizer="bpe", intermediate_size=192)
    engine = tmp_path / "e"
    assert llmserve(monkeypatch, "run", file, "--input-text", "The river") != 0
    assert f"compile it first: llmserve build {file}" in capsys.readouterr().err
    assert llmserve(monkeypatch, "build", file, "--dtype", "float32", "--output-dir", engine) == 0
    assert llmserve(monkeypatch, "inspect", engine, "--verify") == 0
    assert llmserve(monkeypatch, "run", engine, "--input-text", "The river", "--max-output-len", "4") == 0
    assert "--> " in capsys.readouterr().out


def test_build_and_inspect(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert llmserve(monkeypatch, "build", checkpoint, "--dtype", "float32", "--output-dir", tmp_path / "e") == 0
    digest = capsys.readouterr().out.split()[-1]
    assert llmserve(monkeypatch, "inspect", tmp_path / "e", "--verify", "--program") == 0
    shown = capsys.readouterr().out
    assert digest in shown
    assert "self-test passed" in shown
    assert "= logits(" in shown


def test_a_prefix_that_is_too_short_or_too_long_is_refused_before_the_build(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--dtype", "float32", "--output-dir", tmp_path / "e", "--prefix", tmp_path / "system.txt")
    for text, problem in (("the", "a KV block of this engine has 32"), ("the river " * 500, "the prompt is too long")):
        (tmp_path / "system.txt").write_text(text)
        assert llmserve(monkeypatch, "build", checkpoint, *flags) == 2
        assert problem in capsys.readouterr().err
        assert not (tmp_path / "e").exists()


@pytest.mark.parametrize("flag", ["--checkpoint_dir", "--model_dir", "--checkpoint-dir"])
def test_the_checkpoint_in_the_words_of_trtllm_build(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    assert llmserve(monkeypatch, "build", flag, checkpoint, "--dry-run") == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    assert llmserve(monkeypatch, "build", "another", flag, checkpoint, "--dry-run") == 2
    assert "two checkpoints: another and --checkpoint-dir" in capsys.readouterr().err


def test_an_engine_names_the_command_that_builds_it_again(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--dtype", "float32", "--quantization", "int4", "--max-seq-len", 50)
    assert llmserve(monkeypatch, "build", checkpoint, *options, "--output-dir", tmp_path / "engine") == 0
    digest = capsys.readouterr().out.split()[-1]
    program, *command = shlex.split(rebuild_command(tmp_path / "engine"))
    assert (program, command[:2], command[-1]) == ("llmserve", ["build", "CHECKPOINT"], str(tmp_path / "engine"))
    assert llmserve(monkeypatch, "build", checkpoint, *command[2:-1], tmp_path / "again") == 0
    assert capsys.readouterr().out.split()[-1] == digest


def test_dry_run_prints_the_plan_and_writes_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert llmserve(monkeypatch, "build", checkpoint, "--dry-run", "--show-program", "--max-seq-len", "100") == 0
    shown = capsys.readouterr().out
    for part in ("parameters", "KV cache", "sequences that fit", "bound at batch 1", "GB/s", "100 tokens", "= logits("):
        assert part in shown
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_for_gpus_says_what_this_machine_lacks(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert llmserve(monkeypatch, "build", checkpoint, "--dry-run", "--target", "tensorrt_llm") == 0
    shown = capsys.readouterr().out
    assert "pip install 'llmserve[tensorrt]'" in shown  # and not taken for markup
    assert "nvidia-smi was not found" in shown


def test_flags_may_have_underscores_as_trtllm_builds_have(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert llmserve(monkeypatch, "build", checkpoint, "--dry-run", "--max_batch_size", "5", "--max_num_tokens=77") == 0
    assert "5 sequences and 77 tokens per step" in capsys.readouterr().out


def test_the_flags_of_every_target_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert llmserve(monkeypatch, "build", "--help") == 0
    shown = capsys.readouterr().out
    assert sorted(re.findall(r"^  --([a-z-]+)", shown, re.MULTILINE)) == sorted(FLAGS.split())
    for part in (
        "float16 | bfloat16 | float32 (default: float16)",
        "int8 | int4 | gguf (default: none; for a GGUF file without --dtype gguf, on the cpu target)",
        "Prompt and output of one sequence (default: the checkpoint's limit)",
        "Device to compile for: cpu | cuda | tensorrt_llm (default: cpu)",
        "With --target tensorrt_llm",
        "KV cache: paged | continuous | disabled (default: paged)",
    ):
        assert part in " ".join(shown.split())


def test_a_calibrated_build_says_what_it_was_made_with_and_what_it_costs(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "texts.jsonl"
    data.write_text('{"text": "The river is wide."}\n{"prompt_ids": [5, 6, 7]}\n')
    (tmp_path / "recipe.yaml").write_text("quantization: int4\ncalibration_data: texts.jsonl\n")
    flags = ("--recipe", tmp_path / "recipe.yaml", "--output-dir", tmp_path / "e")
    assert llmserve(monkeypatch, "build", checkpoint, *flags, "--dry-run") == 0
    assert "tokens are few" in capsys.readouterr().out
    assert llmserve(monkeypatch, "build", checkpoint, *flags) == 0
    shown = capsys.readouterr()
    assert re.search(r"loss of rounding: mean divergence \S+ nats, the same best token at \S+% of \d+ pos", shown.out)
    assert re.search(r"^  up to 0.03 nats are usual for int4.*\(llmserve eval\)$", shown.out, re.MULTILINE)
    assert llmserve(monkeypatch, "inspect", tmp_path / "e") == 0
    shown_facts = " ".join(capsys.readouterr().out.split())
    assert re.search(r"calibrated with [\d,]+ tokens of 2 lines, sha256 [0-9a-f]{64}", shown_facts)
    assert "loss of rounding mean divergence" in shown_facts
    assert "--calibration-data FILE" in rebuild_command(tmp_path / "e")
    assert llmserve(monkeypatch, "inspect", tmp_path / "e", "--json") == 0
    manifest = json.loads(capsys.readouterr().out)["manifest"]
    assert manifest["calibration"].keys() == {"sha256", "tokens", "lines"}
    assert manifest["loss"].keys() == {"divergence", "agreement", "positions"}


def test_a_tokenizer_that_does_not_go_with_the_network_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = make_checkpoint(tmp_path / "own", "llama")
    without = make_checkpoint(tmp_path / "without", "llama", with_tokenizer=False)
    config = json.loads((own / "config.json").read_text())
    monkeypatch.setattr(encoder, "LEAST_KNOWN", 1.01)  # as if the network knew more
    for checkpoint, note in (
        (own, f"pieces, but the network {config['vocab_size']}; check that they belong together"),
        (without, "no tokenizer.json or tokenizer.model: this engine accepts token ids, but no text"),
    ):
        caplog.clear()
        assert llmserve(monkeypatch, "build", checkpoint, "--output-dir", tmp_path / "e") == 0
        assert any(note in message for message in caplog.messages)


def test_a_recipe_replaces_the_flags(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"checkpoint: {checkpoint}\ndtype: float32\nmax_batch_size: 5\nquantization: int8\n")
    monkeypatch.chdir(tmp_path)
    assert llmserve(monkeypatch, "build", "--recipe", recipe, "--dry-run", "--max-num-tokens", "77") == 0
    shown = capsys.readouterr().out
    assert "float32+int8" in shown
    assert "5 sequences and 77 tokens per step" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build"], "no checkpoint"),
        (["build", "CHECKPOINT", "--dtype", "float8", "--max-batch-size", "0"], "2 problems"),
        (["build", "CHECKPOINT", "--dtype", "int8"], "write --dtype float16 --quantization int8"),
        (["build", "CHECKPOINT", "--max-seq-len", "100000", "--dry-run"], "at most 256 positions"),
        (
            ["build", "CHECKPOINT", "--use-weight-only", "--weight-only-precision", "int3"],
            "precision must be one of int8",
        ),
        (
            ["build", "CHECKPOINT", "--calibration-data", "a.jsonl"],
            "calibration_data has no effect without quantization",
        ),
        (
            ["build", "CHECKPOINT", "--quantization", "int4", "--calibration-data", "a.jsonl"],
            "calibration data a.jsonl does not exist",
        ),
        (["build", "nowhere"], "nowhere"),
        (["build", "--recipe", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (["inspect", "CHECKPOINT"], "is a Hugging Face checkpoint, not an engine"),
        (["inspect", "nowhere"], "no engine directory"),
    ],
)
def test_wrong_input_is_one_message_and_exit_code_2(
    checkpoint: Path,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert llmserve(monkeypatch, *[str(checkpoint) if a == "CHECKPOINT" else a for a in arguments]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ")
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert list(tmp_path.iterdir()) == []


def test_flags_of_trtllm_build_are_taken_for_the_cpu_too(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = (
        "--use-weight-only",
        "--weight-only-precision",
        "int8",
        "--gemm-plugin",
        "float16",
        "--context-fmha",
        "enable",
    )
    assert llmserve(monkeypatch, "build", checkpoint, "--dry-run", *flags, "--remove-input-padding", "enable") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in (
        "float16+int8",
        "without effect on the cpu target: gemm_plugin float16",
        "rounds activations to int8 too",
    ):
        assert part in shown
    assert llmserve(monkeypatch, "build", checkpoint, "--tp-size", "2", "--kv-cache-type", "disabled") == 2
    shown = capsys.readouterr().err
    assert "2 problems" in shown
    assert "tp_size 2 is for the tensorrt_llm target" in shown


def test_a_plan_for_gpus_needs_none(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what a build would lack here."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"checkpoint: {checkpoint}\ntarget: tensorrt_llm\ntp_size: 2\nparallel_build: true\n")
    assert llmserve(monkeypatch, "build", "--recipe", recipe, "--dry-run") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in (
        "tensorrt_llm, float16",
        "KV cache",
        "tensorrt-llm, which is not installed",
        "nvidia-smi was not found",
    ):
        assert part in shown
    assert "memory here" not in shown
    assert llmserve(monkeypatch, "build", "--recipe", recipe, "--output-dir", tmp_path / "e") == 2
    assert "this machine cannot build for tensorrt_llm (2 problems)" in capsys.readouterr().err
    assert not (tmp_path / "e").exists()


def test_inspect_fails_by_name_when_a_file_is_damaged(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = tmp_path / "e"
    assert llmserve(monkeypatch, "build", checkpoint, "--output-dir", engine) == 0
    with (engine / "rank0.engine").open("r+b") as file:
        file.truncate(1000)
    assert llmserve(monkeypatch, "inspect", engine) == 2
    shown = capsys.readouterr().err
    assert "rank0.engine has 1000 bytes" in shown
    assert f"llmserve build CHECKPOINT --target cpu --output-dir {engine}" in shown


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_build_leaves_nothing(checkpoint: Path, tmp_path: Path, number: int, code: int) -> None:
    process = halted_build(checkpoint, tmp_path / "e")
    assert [path.name.startswith(".e.tmp-") for path in tmp_path.iterdir()] == [True]
    os.kill(process.pid, number)
    assert process.wait(timeout=20) == code
    assert process.stdout is not None
    process.stdout.close()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_build_leaves_no_engine_and_the_next_one_cleans_up(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = halted_build(checkpoint, tmp_path / "e")
    process.kill()
    process.wait(timeout=20)
    assert process.stdout is not None
    process.stdout.close()
    assert not (tmp_path / "e").exists()
    assert llmserve(monkeypatch, "build", checkpoint, "--output-dir", tmp_path / "e") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["e"]


def halted_build(checkpoint: Path, output: Path) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, "-c", HALTING, "build", str(checkpoint), "--output-dir", str(output)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stdout.readline() == b"compiling\n"
    time.sleep(0.05)
    return process


def test_the_default_place_says_what_is_in_it() -> None:
    assert default_output_dir(Path("/models/Baichuan2-7B"), BuildOptions()) == Path("engines/Baichuan2-7B-fp16")
    assert default_output_dir(Path("/models/x.Q4_1.gguf"), BuildOptions()) == Path("engines/x.Q4_1-fp16")
    options = BuildOptions(dtype="bfloat16", quantization="int8")
    assert default_output_dir(Path("/models/x/"), options) == Path("engines/x-bf16-int8")
    options = BuildOptions.from_flat({"target": "tensorrt_llm", "tp_size": 2})
    assert default_output_dir(Path("/models/x"), options) == Path("engines/x-fp16-tensorrt_llm-tp2")


def test_a_checkpoint_in_the_cache_of_hugging_face_has_its_own_name(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--Qwen--Qwen3-0.6B-GGUF" / "snapshots" / "23749fefcc72"
    snapshot.mkdir(parents=True)
    (snapshot / "Qwen3-0.6B-Q8_0.gguf").symlink_to(tmp_path / "9465e63a22ad")
    file = default_output_dir(snapshot / "Qwen3-0.6B-Q8_0.gguf", BuildOptions())
    assert file == Path("engines/Qwen3-0.6B-Q8_0-fp16")
    assert default_output_dir(snapshot, BuildOptions()) == Path("engines/Qwen3-0.6B-GGUF-fp16")


FILES = {"quantized": "Q4_0", "in floats": "F16"}
ASKED = {
    "": {"quantized": "float16+gguf", "in floats": "float16,"},
    "--dtype float16": {"quantized": "float16,", "in floats": "float16,"},
    "--quantization int8": {"quantized": "float16+int8", "in floats": "float16+int8"},
    "--max-seq-len 64 --kv-cache-dtype int8": {"quantized": "float16+gguf", "in floats": "float16,"},
}


@pytest.mark.parametrize("flags", ASKED)
@pytest.mark.parametrize("kind", FILES)
def test_a_gguf_file_keeps_its_own_numbers_unless_a_format_is_asked_for(
    kind: str, flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = make_gguf(tmp_path / "m.gguf", stored=FILES[kind], intermediate_size=192)
    assert llmserve(monkeypatch, "build", file, "--dry-run", *flags.split()) == 0
    assert f"cpu, {ASKED[flags][kind]}" in capsys.readouterr().out


def test_a_recipe_asks_for_a_format_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = make_gguf(tmp_path / "m.gguf", stored="Q4_0", intermediate_size=192)
    recipe = tmp_path / "recipe.yaml"
    for content, said in (("dtype: bfloat16", "bfloat16,"), ("max_batch_size: 3", "float16+gguf")):
        recipe.write_text(f"{content}\n")
        assert llmserve(monkeypatch, "build", file, "--recipe", recipe, "--dry-run") == 0
        assert f"cpu, {said}" in capsys.readouterr().out
