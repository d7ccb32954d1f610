"""Tests a wheel as a user without a compiler does: python tools/wheels/trial.py WHEEL

It installs the wheel into a new environment, with binary packages only and only that environment on PATH. It builds the
demo engine, serves it, and sends requests. The test fails if an installation takes 300 MB or more, or if none of ten
server starts takes less than 1.5 s: disturbances make a start slower, never faster. If the machine has more work than
cores, starts are measured but not judged. It needs only Python, because it runs on machines that have nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "build/checkpoints/baichuan2-tiny-docsum"
QUESTION = "Summarize: The connection is closed. Any pending data is sent before."
ANSWER = "Close the connection."
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cmake", "ninja", "make", "zig")
NOT_OURS = ("pip", "setuptools", "_distutils_hack", "pkg_resources")  # what every environment's site-packages has
MOST_BYTES = 300_000_000
MOST_SECONDS = 1.5
NUM_STARTS = 10


def environment_of(folder: Path) -> dict[str, str]:
    """Environment variables like on a machine without a compiler: PATH has only the environment."""
    path = str(folder / "bin")
    found = [name for name in COMPILERS if shutil.which(name, path=path)]
    assert not found, f"{path} has {found}"
    kept = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX", "PYTHONPATH", "VIRTUAL_ENV")}
    return {**kept, "PATH": path}


def install(wheel: Path, folder: Path) -> dict[str, str]:
    venv.create(folder, with_pip=True)
    environment = environment_of(folder)
    pip = [f"{folder}/bin/python", "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    subprocess.run([*pip, "--only-binary", ":all:", wheel], check=True, env=environment)
    assert environment_of(folder), "a package has brought a compiler"
    return environment


def installed_bytes(folder: Path) -> int:
    (packages,) = folder.glob("lib/python3*/site-packages")
    files = (path for path in packages.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files if not path.relative_to(packages).parts[0].startswith(NOT_OURS))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


class Server:
    """`llmserve serve ENGINE`; `seconds`: from the start of the process until it reports that it is ready."""

    def __init__(self, engine: Path, environment: dict[str, str]) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        ports = ["--http-port", self.url.rpartition(":")[2], "--grpc-port", "0", "--metrics-port", "0"]
        command = ["llmserve", "serve", str(engine), "--host", "127.0.0.1", *ports]
        started = time.monotonic()
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        while not self._is_ready():
            assert self.process.poll() is None, "the server has ended"
            time.sleep(0.005)
        self.seconds = time.monotonic() - started

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/v2/health/ready", timeout=5):
                return True
        except OSError:
            return False

    def ask(self, question: str) -> str:
        body = {"model": "ensemble", "temperature": 0, "messages": [{"role": "user", "content": question}]}
        request = urllib.request.Request(f"{self.url}/v1/chat/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            text: str = json.load(answer)["choices"][0]["message"]["content"]
            return text

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(timeout=60) == 0


def try_wheel(wheel: Path, folder: Path) -> list[str]:
    """Returns what is wrong with it."""
    environment = install(wheel, folder / "environment")
    size = installed_bytes(folder / "environment")
    print(f"installed: {size / 1e6:.0f} MB", flush=True)
    engine = folder / "engine"
    subprocess.run(["llmserve", "build", CHECKPOINT, "--output-dir", engine], check=True, env=environment)
    server = Server(engine, environment)
    answer = server.ask(QUESTION)
    server.stop()
    print(f"asked, it says: {answer}", flush=True)
    is_busy = os.getloadavg()[0] > (os.cpu_count() or 1)
    starts = []
    for _ in range(NUM_STARTS):
        server = Server(engine, environment)
        starts.append(server.seconds)
        server.stop()
    print(f"start to ready: {min(starts):.2f} to {max(starts):.2f} s, median {statistics.median(starts):.2f} s", end="")
    print(" on a busy machine, which says nothing" if is_busy else "")
    found = {
        f"the installation takes {size / 1e6:.0f} MB": size >= MOST_BYTES,
        f"it should have said {ANSWER!r}": answer.strip() != ANSWER,
        f"no start was below {MOST_SECONDS} s": min(starts) >= MOST_SECONDS and not is_busy,
    }
    return [problem for problem, is_so in found.items() if is_so]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        problems = try_wheel(Path(sys.argv[1]).resolve(), Path(folder))
    for problem in problems:
        print(f"wrong: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
