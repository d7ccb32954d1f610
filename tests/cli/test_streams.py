"""Unusual standard streams: closed, full, or of an encoding with few characters."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.cli.chat.terminal import LLMSERVE


def llmserve(redirections: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[bytes]:
    command = f"exec {shlex.join([*LLMSERVE, *map(str, arguments)])} {redirections}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
    return subprocess.run(["/bin/sh", "-c", command], capture_output=True, timeout=120, env=environment)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built with standard error closed."""
    folder = tmp_path_factory.mktemp("streams")
    checkpoint = make_checkpoint(folder / "tiny", "llama")
    done = llmserve("2>&-", "build", checkpoint, "--dtype", "float32", "--output-dir", folder / "engine")
    assert done.returncode == 0
    assert b"engine digest" in done.stdout
    return folder / "engine"


def test_characters_that_the_encoding_does_not_have(engine: Path) -> None:
    question = "\u4f60"
    prompt = ("--input-text", question, "--max-output-len", "2")
    done = llmserve("", "run", engine, *prompt, PYTHONIOENCODING="latin-1", PYTHONUTF8="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"[0] ?\n")


def test_a_chat_without_questions(engine: Path) -> None:
    done = llmserve("<&-", "chat", engine)
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr


def test_output_that_leads_nowhere(engine: Path) -> None:
    assert llmserve(">&-", "inspect", engine).returncode == 0


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", ["--version", "inspect ENGINE", "run ENGINE --input-text x"])
def test_output_that_finds_no_room(engine: Path, arguments: str, unbuffered: str) -> None:
    words = arguments.replace("ENGINE", str(engine)).split()
    done = llmserve(">/dev/full", *words, PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 1
    assert done.stderr.endswith(b"error: the output cannot be written: No space left on device\n")
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_read_enough(unbuffered: str) -> None:
    done = llmserve("| true", "--help", PYTHONUNBUFFERED=unbuffered)
    assert done.stderr == b""
