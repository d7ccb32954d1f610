"""The walk of TensorRT-LLM's Baichuan example, 0.5 to 0.8, and of Triton: each command as its documentation has it,
with only the program's name changed. Nothing is refused.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from llmserve.evaluation.baseline import hf
from tests.checkpoints import make_checkpoint
from tests.e2e.conftest import llmserve, start_server
from tests.e2e.published import write_published_repository
from tests.e2e.test_streaming import streamed_text
from tests.evaluation.suites import write_suite

PROGRAMS = {
    "python build.py": "build",
    "python convert_checkpoint.py": "convert-checkpoint",
    "trtllm-build": "build",
    "python ../run.py": "run",
    "python ../summarize.py": "eval",
    "tritonserver": "tritonserver",
}
MODEL = "baichuan-inc/Baichuan2-7B-Chat"
BUILD_COMMANDS = """
python build.py --model_version v2_7b --model_dir baichuan-inc/Baichuan2-7B-Chat --dtype float16 \
--use_gemm_plugin float16 --use_gpt_attention_plugin float16 --output_dir ./fp16
python build.py --model_version v2_7b --model_dir baichuan-inc/Baichuan2-7B-Chat --dtype float16 --use_gemm_plugin \
--use_gpt_attention_plugin --use_weight_only --weight_only_precision int4 --per_group --output_dir ./int4
python build.py --model_version v2_7b --model_dir baichuan-inc/Baichuan2-7B-Chat --dtype float16 --parallel_build \
--use_gemm_plugin float16 --use_gpt_attention_plugin float16 --enable_context_fmha --use_inflight_batching \
--paged_kv_cache --remove_input_padding --use_rmsnorm_plugin --max_batch_size 8 --max_input_len 128 \
--max_output_len 64 --world_size 1 \
--log_level verbose --visualize --timing_cache model.cache --tokens_per_block 64 --output_dir ./engine
python convert_checkpoint.py --model_version v2_7b --model_dir baichuan-inc/Baichuan2-7B-Chat --dtype float16 \
--use_weight_only --world_size 1 --output_dir ./trt_ckpt/int8_weight_only/1-gpu/
trtllm-build --checkpoint_dir ./trt_ckpt/int8_weight_only/1-gpu/ --output_dir ./int8 --gemm_plugin float16 \
--max_batch_size=8 --max_input_len=128 --max_output_len=64 --use_fused_mlp
trtllm-build --checkpoint_dir baichuan-inc/Baichuan2-7B-Chat --gemm_plugin float16 --gpt_attention_plugin float16 \
--context_fmha enable --paged_kv_cache enable --remove_input_padding enable --max_num_tokens 2048 --workers 1 \
--profiling_verbosity detailed --output_dir ./trtllm
"""
RUN_COMMANDS = """
python ../run.py --model_version v2_7b --max_output_len=8 --tokenizer_dir baichuan-inc/Baichuan2-7B-Chat \
--engine_dir=./fp16 --use_py_session --log_level info
python ../run.py --max_output_len=8 --tokenizer_dir=baichuan-inc/Baichuan2-7B-Chat --engine_dir=./int8
python ../run.py --input_text "the river" --max_output_len=8 --tokenizer_dir=baichuan-inc/Baichuan2-7B-Chat \
--engine_dir=./int4 --num_beams 1 --streaming
"""
SUMMARIZE_COMMAND = """
python ../summarize.py --model_version v2_7b --test_trt_llm --test_hf --hf_model_dir baichuan-inc/Baichuan2-7B-Chat \
--data_type fp16 --engine_dir ./fp16 --max_ite 8 --batch_size 1 --output_len 16 --check_accuracy \
--tensorrt_llm_rouge1_threshold=-1
"""
SERVER_COMMAND = """
tritonserver --model-repository=./repository --allow-http=true --allow-metrics=1 --pinned-memory-pool-byte-size=1 \
--log-verbose=0 --backend-directory=/opt/tritonserver/backends --exit-on-error=true
"""
CURL_COMMAND = """
curl -sf -X POST localhost:8000/v2/models/ensemble/generate -d '{"text_input": "the river", "max_tokens": 8, \
"bad_words": "", "stop_words": ""}'
"""


def words(command: str, folder: Path) -> list[str]:
    """What is typed behind `llmserve`, with the files of `folder`."""
    program = next(name for name in PROGRAMS if command.startswith(name))
    flags = command.removeprefix(program).replace(MODEL, f"./{MODEL}").replace("./", f"{folder}/")
    return [PROGRAMS[program], *shlex.split(flags)]


def commands(text: str) -> list[str]:
    return text.strip().splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the checkpoint is, and every engine of the walk."""
    folder = tmp_path_factory.mktemp("walk")
    make_checkpoint(folder / MODEL, "baichuan2-7b")
    for command in commands(BUILD_COMMANDS):
        done = llmserve(*words(command, folder))
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("Without effect here:") <= 1
    return folder


@pytest.mark.parametrize("command", commands(RUN_COMMANDS))
def test_run(command: str, folder: Path) -> None:
    done = llmserve(*words(command, folder))
    assert done.returncode == 0, done.stderr
    assert "--> " in done.stdout


@pytest.mark.skipif(not hf.is_available(), reason="torch computes the baseline")
def test_summarize(folder: Path, tmp_path: Path) -> None:
    suite = write_suite(tmp_path, margins={"rouge1": 90.0}, inconclusive="pass")
    typed = [*words(SUMMARIZE_COMMAND.strip(), folder), "--suite", str(suite), "--no-as-served"]
    done = llmserve(*typed, "--output", str(tmp_path / "report.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [done.stdout.count(f"  {name} : ") for name in ("rouge1", "rouge2", "rougeL", "rougeLsum")] == [2, 2, 2, 2]


def test_serve(folder: Path, tmp_path: Path) -> None:
    repository = write_published_repository(folder / "repository", release="0.8")
    for config in repository.rglob("config.pbtxt"):  # as fill_template.py leaves them
        filled = config.read_text().replace("/engines/of/another/machine", str(folder / "engine"))
        config.write_text(filled.replace("/tokenizers/of/another/machine", str(folder / MODEL)))
    offline = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command, *flags = words(SERVER_COMMAND.strip(), folder)
    server = start_server(*flags, env=offline, command=command)
    try:
        curl = shlex.split(CURL_COMMAND.replace("localhost:8000", server.http))
        answer = subprocess.run(curl, capture_output=True, text=True, timeout=60)
        assert answer.returncode == 0, answer.stdout
        assert json.loads(answer.stdout)["text_output"]
        assert len(streamed_text(server.grpc, "the river", max_tokens=8)) > 1
    finally:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0
