"""`llmserve run` over an engine whose answers are known."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmserve.cli import run
from llmserve.cli.main import main
from llmserve.cli.run import RunOptions
from llmserve.cli.run_flags import spread
from llmserve.engine.base import Engine, RunnerInfo
from llmserve.engine.fake import fake_answer, fake_engine
from llmserve.engine.settings import EngineSettings
from llmserve.scheduler.drafts.drafter import Speculation
from llmserve.stages.tokenizer import load_tokenizer
from tests.stages.conftest import write_baichuan

VOCAB_SIZE, MAX_SEQ_LEN = 620, 64
LIMITS = RunnerInfo(
    vocab_size=VOCAB_SIZE, block_size=4, num_blocks=512, max_num_tokens=64, max_batch_size=32, max_seq_len=MAX_SEQ_LEN
)


@pytest.fixture
def text_dir(tmp_path: Path) -> Path:
    path = tmp_path / "engine"
    path.mkdir()
    write_baichuan(path)
    return path


@pytest.fixture
def tell(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    def open_fake(path: Path, settings: EngineSettings) -> Engine:
        return fake_engine(LIMITS, settings=settings.scheduler)

    monkeypatch.setattr(run, "open_engine", open_fake)
    return monkeypatch


def llmserve_run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["llmserve", "run", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


def test_drafters_are_chosen_by_name(
    text_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[EngineSettings] = []

    def open_fake(path: Path, settings: EngineSettings) -> Engine:
        opened.append(settings)
        return fake_engine(LIMITS, settings=settings.scheduler)

    monkeypatch.setattr(run, "open_engine", open_fake)
    for flags in ([], ["--speculation", "grammar"], ["--speculation", "off", "--draft-engine", "small"]):
        assert llmserve_run(monkeypatch, str(text_dir), "--input-text", "hello", *flags) == 0
    assert [each.scheduler.speculation for each in opened] == [Speculation.ALL, Speculation.GRAMMAR, Speculation.OFF]
    assert [each.gpu.draft_engine for each in opened] == ["", "", str(Path("small").absolute())]
    assert llmserve_run(monkeypatch, str(text_dir), "--input-text", "hello", "--speculation", "drafts") == 2
    assert "--speculation 'drafts': expected off, or names of drafters" in capsys.readouterr().err


def test_a_prompt_may_stand_behind_the_engine(
    tell: pytest.MonkeyPatch, text_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert llmserve_run(tell, str(text_dir), "--input-text", "red fox", "--max-output-len", "4") == 0
    flagged = capsys.readouterr().out
    assert llmserve_run(tell, str(text_dir), "red fox", "--max-output-len", "4") == 0
    answers = [re.sub(r"[\d.]+ ?(ms|s|tokens/s|MiB)", "", text) for text in (flagged, capsys.readouterr().out)]
    assert answers[0] == answers[1]
    assert llmserve_run(tell, str(text_dir)) == 2
    assert "no prompt; give one after the engine" in capsys.readouterr().err


def test_more_prompts_than_a_server_lets_wait(
    tmp_path: Path, text_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def open_fake(path: Path, settings: EngineSettings) -> Engine:
        return fake_engine(settings=settings.scheduler, step_delay_s=0.05)

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n" * 1200)
    monkeypatch.setattr(run, "open_engine", open_fake)
    assert llmserve_run(monkeypatch, str(text_dir), "--input-file", str(prompts), "--max-output-len", "1") == 0
    assert "1200 prompts" in capsys.readouterr().out


def test_the_command_line_of_run_py(
    tmp_path: Path, text_dir: Path, tell: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = tmp_path / "without-tokenizer"
    engine.mkdir()
    flags = "--max_output_len 6 --num_beams 1 --top_k 1 --top_p 0.0 --temperature 1.0 --presence_penalty 0.0"
    flags += " --frequency_penalty 0.0 --min_p 0 --repetition_penalty 1.0 --random_seed 0"
    words = ["--input_text", "The fox", "the hill", "--stop_words", "never", "said", "--bad_words", "this", "that"]
    code = llmserve_run(
        tell, "--engine_dir", str(engine), "--tokenizer_dir", str(text_dir), *words, *flags.split(), "--streaming"
    )
    shown = capsys.readouterr()
    assert code == 0, shown.err
    tokenizer = load_tokenizer(text_dir)
    for index, prompt in enumerate(("The fox", "the hill")):
        answer = tokenizer.decode(fake_answer(tokenizer.encode(prompt), 6, VOCAB_SIZE))
        assert f"[{index}] {prompt}\n--> {answer}" in shown.out


def test_a_benchmark_makes_its_prompts_and_says_how_fast_it_was(
    text_dir: Path, tell: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--benchmark", "3", "--input-tokens", "20", "--max-output-len", "8"]
    assert llmserve_run(tell, str(text_dir), *flags) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("3 prompts, 60 prompt tokens, 24 new tokens in ")
    assert re.fullmatch(r"first token after [\d.]+ ms, [\d.]+ ms between tokens, peak memory \d+ MiB", second)
    assert llmserve_run(tell, str(text_dir), *flags, "--input-text", "x") == 2
    assert "--benchmark makes its prompts" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["csv", "npy"])
def test_token_ids_in_files_and_out(
    tmp_path: Path, text_dir: Path, tell: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    prompts = [[300, 301, 302], [400]]
    given, out = tmp_path / f"in.{suffix}", tmp_path / "new/out"
    if suffix == "csv":
        given.write_text("300,301,302\n400\n")
    else:
        np.save(given, np.array([[300, 301, 302], [400, 0, 0]], np.int32))  # 0 is this tokenizer's padding
    files = ["--output_csv", f"{out}.csv", "--output_npy", f"{out}.npy"]
    code = llmserve_run(tell, str(text_dir), "--input_file", str(given), "--max_output_len", "4", *files)
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert "-->" not in shown.out
    rows = [[*prompt, *fake_answer(prompt, 4, VOCAB_SIZE)] for prompt in prompts]
    padded = [row + [0] * (len(rows[0]) - len(row)) for row in rows]
    written = np.load(f"{out}.npy")
    assert (written.dtype, written.tolist()) == (np.int32, padded)
    assert Path(f"{out}.csv").read_text().split() == [",".join(map(str, row)) for row in padded]


def test_an_engine_without_a_tokenizer_takes_ids_and_no_text(
    tmp_path: Path, text_dir: Path, tell: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("tokenizer.json", "tokenizer.model"):
        (text_dir / name).unlink(missing_ok=True)
    given = tmp_path / "in.csv"
    given.write_text("300,301,302\n")
    assert llmserve_run(tell, str(text_dir), "--input_file", str(given), "--max_output_len", "4") == 0
    answer = " ".join(map(str, fake_answer([300, 301, 302], 4, VOCAB_SIZE)))
    assert f"[0]  300 301 302\n-->  {answer}  (length)" in capsys.readouterr().out
    for flags in (["hello"], ["--input_file", str(given), "--stop_words", "end"]):
        assert llmserve_run(tell, str(text_dir), *flags) == 2
        assert "has no tokenizer" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_said_before_the_work(
    tmp_path: Path, text_dir: Path, tell: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tell.setattr(run.OneShot, "answer", None)
    assert llmserve_run(tell, str(text_dir), "Hi", "--output-csv", str(text_dir)) == 2
    assert f"{text_dir} cannot be written: Is a directory" in capsys.readouterr().err


def test_what_is_cut_to_fit_is_said(
    text_dir: Path, tell: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "The small red fox runs over the quiet hill and hides under the old stone bridge. " * 3
    assert llmserve_run(tell, str(text_dir), "--chat", "--input-text", long, "--max-output-len", "500") == 0
    said = capsys.readouterr().err
    assert "note: [0] the conversation was truncated, without the first " in said
    assert "note: [0] max_tokens is 500, and after a prompt of 32 tokens there is room for 32" in said
    assert llmserve_run(tell, str(text_dir), "--input-text", "fox", "--max-output-len", "5") == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("options", "temperature"),
    [
        ({}, 0.0), ({"top_k": 1}, 0.0), ({"top_k": 5}, 1.0), ({"top_p": 0.9}, 1.0), ({"top_p": 0.0}, 0.0),
        ({"min_p": 0.1}, 1.0), ({"top_k": 5, "temperature": 0.3}, 0.3), ({"temperature": 0.7}, 0.7),
    ],
)  # fmt: skip
def test_asking_for_a_draw_is_enough_to_get_one(options: dict[str, Any], temperature: float) -> None:
    sampling = RunOptions(**options).sampling()
    assert (sampling.temperature, sampling.problems()) == (temperature, [])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no engine: give its directory"),
        (["a", "--engine_dir", "b"], "two engines"),
        (["a", "--num_beams", "4", "--max-output-len", "0"], "2 problems"),
        (["a", "--stop_words", "x", "--stop_words", "y"], "--stop_words may be given once"),
    ],
)
def test_what_run_py_has_and_this_has_not_is_refused(
    tell: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert llmserve_run(tell, *arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.csv", b"1,two\n", "must have token ids"),
        ("x.npy", b"no array", "is not an array of numpy"),
        ("x.txt", b"\n\n", "no prompt"),
        ("gone.txt", None, "cannot be read"),
    ],
)
def test_files_that_are_not_what_they_should_be(
    tmp_path: Path, text_dir: Path, tell: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    name: str, content: bytes | None, words: str,
) -> None:  # fmt: skip
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert llmserve_run(tell, str(text_dir), "--input-file", str(tmp_path / name)) == 2
    assert words in capsys.readouterr().err


def test_several_values_follow_only_the_names_of_run_py() -> None:
    assert spread(["--input_text", "a", "b", "--top_k", "1", "x"]) == [
        "--input_text", "a", "--input_text", "b", "--top_k", "1", "x",
    ]  # fmt: skip
    assert spread(["--input-text", "a", "ENGINE"]) == ["--input-text", "a", "ENGINE"]


def test_a_tokenizer_that_is_not_there(
    text_dir: Path, tell: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--engine_dir", str(text_dir), "--tokenizer_dir", "baichuan-inc/Baichuan2-7B-Chat"]
    assert llmserve_run(tell, *given) == 2
    assert (
        "an engine directory has a tokenizer, so leave tokenizer_dir (--tokenizer-dir) out" in capsys.readouterr().err
    )


def test_run_py_without_a_prompt_has_one(
    text_dir: Path, tell: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--model_version v2_7b --log_level info --use_py_session --max_output_len=2"
    assert llmserve_run(tell, f"--engine_dir={text_dir}", *flags.split()) == 0
    shown = capsys.readouterr()
    assert "[0] The highest mountain in the world is\n--> " in shown.out
    assert "--model_version (config.json of the checkpoint says it)" in shown.err
    assert llmserve_run(tell, str(text_dir)) == 2
