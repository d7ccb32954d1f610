from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from llmserve import sealed_log
from llmserve.errors import InvalidArgument, Unsupported
from llmserve.sealed_log import Signer, Verifier


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "records.jsonl"
    for number in range(3):
        sealed_log.append(path, {"number": number, "text": "\u00e9"})
    return path


def new_key(folder: Path, name: str = "key", algorithm: str = "ed25519") -> tuple[Path, Path]:
    """Both halves, as OpenSSL writes them."""
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    subprocess.run(["openssl", "genpkey", "-algorithm", algorithm, "-out", private], check=True, capture_output=True)
    subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True, capture_output=True)
    return private, public


def test_what_was_added_comes_back_in_order(log: Path) -> None:
    assert [line.content["number"] for line in sealed_log.read(log)] == [0, 1, 2]
    assert sealed_log.read(log.with_name("nothing.jsonl")) == []


def edited(lines: list[str]) -> list[str]:
    return [lines[0].replace('"number": 0', '"number": 7'), *lines[1:]]


def sealed_again(lines: list[str]) -> list[str]:
    found: dict[str, Any] = json.loads(lines[1])
    found["content"]["number"] = 7
    found["seal"] = sealed_log._seal(found["content"], found["previous"])
    return [lines[0], json.dumps(found), lines[2]]


@pytest.mark.parametrize(
    ("change", "number"),
    [
        (edited, 1), (lambda lines: lines[1:], 1), (lambda lines: [lines[0], lines[2]], 2), (sealed_again, 3),
        (lambda lines: [lines[1], lines[0], lines[2]], 1), (lambda lines: [*lines, "{}"], 4),
        (lambda lines: [*lines, lines[2][:40]], 4), (lambda lines: ["", *lines], 1), (lambda lines: ["3"], 1),
    ],
)  # fmt: skip
def test_a_change_is_seen(log: Path, change: Callable[[list[str]], list[str]], number: int) -> None:
    log.write_text("\n".join(change(log.read_text().splitlines())) + "\n")
    with pytest.raises(InvalidArgument, match=f"line {number} of .* was changed, or one before it was dropped"):
        sealed_log.read(log)
    before = log.read_text()
    with pytest.raises(InvalidArgument, match=f"line {number}"):
        sealed_log.append(log, {"number": 3})
    assert log.read_text() == before


@pytest.mark.parametrize("end", ['{"content": {"num', "\u00e9"])
def test_a_line_that_was_cut_off_counts_for_nothing_and_makes_room(
    log: Path, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = log.read_text()
    log.write_text(whole + end)
    assert [line.content["number"] for line in sealed_log.read(log)] == [0, 1, 2]
    assert "was cut off, by a full disk or a crash" in caplog.text
    sealed_log.append(log, {"number": 3})
    assert log.read_text().startswith(whole)
    assert [line.content["number"] for line in sealed_log.read(log)] == [0, 1, 2, 3]


def test_a_full_disk_leaves_the_file_as_it_was(log: Path) -> None:
    """As a limit of the size of files, in a process of its own."""
    whole = log.read_text()
    program = (
        "import pathlib, resource, signal, sys; from llmserve import sealed_log; from llmserve.errors import *\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))\n"
        "try: sealed_log.append(pathlib.Path(sys.argv[1]), {'number': 3})\n"
        "except InvalidArgument as error: print(error)"
    )
    command = [sys.executable, "-c", program, str(log), str(len(whole.encode()) + 20)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert f"{log} cannot be added to" in said
    assert log.read_text() == whole


def test_many_may_add_at_once(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: sealed_log.append(path, {"number": number}), range(40)))
    assert sorted(line.content["number"] for line in sealed_log.read(path)) == list(range(40))


def test_a_signature_is_the_keys(tmp_path: Path) -> None:
    private, public = new_key(tmp_path)
    _, other = new_key(tmp_path, "other")
    path = tmp_path / "records.jsonl"
    sealed_log.append(path, {"number": 0})
    sealed_log.append(path, {"number": 1}, Signer.load(private))
    unsigned, signed = sealed_log.read(path)
    verifier = Verifier.load(other, public)
    assert verifier.problem(signed) == ""
    assert verifier.problem(unsigned) == "it is not signed"
    assert "signed with the key" in Verifier.load(other).problem(signed)
    forged = sealed_log.Line({"number": 9}, unsigned.seal, signed.key, signed.signature)
    assert "its signature is not the key" in verifier.problem(forged)
    assert "its signature" in verifier.problem(sealed_log.Line({}, signed.seal, signed.key, "?"))


def test_a_key_that_is_none_is_refused(tmp_path: Path) -> None:
    private, public = new_key(tmp_path)
    rsa, _ = new_key(tmp_path, "rsa", "RSA")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        Signer.load(tmp_path / "nothing.pem")
    with pytest.raises(InvalidArgument, match="is not the private half"):
        Signer.load(public)
    with pytest.raises(InvalidArgument, match="is not the public half"):
        Verifier.load(private)
    with pytest.raises(InvalidArgument, match="is not an Ed25519 key"):
        Signer.load(rsa)


def test_without_cryptography_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(Unsupported, match=r"pip install 'llmserve\[sign\]'"):
        Signer.load(tmp_path / "key.pem")


def test_a_folder_that_takes_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot be added to"):
        sealed_log.append(tmp_path / "none" / "records.jsonl", {})
