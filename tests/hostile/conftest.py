"""A real server with models that give back what they get, and a prober beside it.

`make test` runs small attacks and asks only that the server is never gone for seconds: it shares its machine. `make
hostile` runs them in full and holds the server to the limits that it promises.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import ROOT, ServerProcess, start_server
from tests.hostile.measured import MOST
from tests.hostile.prober import Seen
from tests.tiny_tokenizers import write_byte_level_tokenizer

IS_STRICT = bool(os.environ.get("HOSTILE_STRICT"))
MIB = 1024 * 1024
LIMIT_BYTES = (1024 if IS_STRICT else 256) * MIB  # --request-memory
EACH_BYTES = (512 if IS_STRICT else 128) * MIB
SLACK_BYTES = (500 if IS_STRICT else 250) * MIB  # for buffers of sockets, and what the allocator keeps
SLOWEST_S = 0.25 if IS_STRICT else 3.0
MOST_OWN_S = 0.05 if IS_STRICT else 0.5  # of the event loop at a time, as processor time

MODEL = """
backend: "identity"
input {{ name: "IN" data_type: TYPE_{datatype} dims: [ -1 ] }}
output {{ name: "OUT" data_type: TYPE_{datatype} dims: [ -1 ] }}
"""
MAX_SEQ_LEN = 4096  # of the engine that preprocessing is for
ANY_LENGTH = "any_length"  # prepares prompts for an engine whose limit is not known
DATATYPES = {"texts": "STRING", "floats": "FP32", "integers": "INT32"}
TEMPLATES = {  # of models that prepare prompts
    "loops": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "widths": "{{ '%999999999d' % messages|length }}",
}


def full_only(*names: Any, among: Iterable[Any]) -> list[Any]:
    """Of the cases of a test, `names` are left to `make hostile`."""
    skipped = pytest.mark.skipif(not IS_STRICT, reason="make hostile")
    return [pytest.param(name, marks=skipped) if name in names else name for name in among]


@dataclass(frozen=True)
class Target:
    server: ServerProcess
    temporary: Path  # where the server puts what is temporary
    own: Path  # where its loop says how long it was busy at a time: `measured.py`

    @property
    def http_port(self) -> int:
        return self.server.ports["HTTPService"]

    @property
    def grpc_port(self) -> int:
        return self.server.ports["GRPCInferenceService"]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While something is done to the server: it answers, and its memory stays within bounds."""
        before = psutil.Process(self.server.process.pid).memory_info().rss
        with self.own.open("r+b") as file:  # which the server has mapped
            file.write(MOST.pack(0.0))
        command = [sys.executable, "-m", "tests.hostile.prober", str(self.http_port), str(self.server.process.pid)]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as prober:
            assert prober.stdout is not None
            assert prober.stdout.readline() == "watching\n"
            try:
                yield
            finally:
                output, _ = prober.communicate()
        seen = Seen(**json.loads(output))
        [own_s] = MOST.unpack(self.own.read_bytes())
        print(f"slowest {seen.slowest_s * 1e3:.0f} ms, own {own_s * 1e3:.0f} ms, "
              f"{(seen.peak_bytes - before) / MIB:+.0f} MiB, {seen}")  # fmt: skip
        assert self.server.process.poll() is None, "the server has ended"
        assert seen.num_failures == 0, seen
        assert seen.slowest_s - seen.late_s < SLOWEST_S, seen
        assert own_s < MOST_OWN_S, seen
        assert seen.peak_bytes - before < LIMIT_BYTES + SLACK_BYTES, seen


def write_preprocessing(path: Path, template: str = "") -> None:
    """That of the pipelines under another name, for an engine of MAX_SEQ_LEN tokens."""
    shutil.copytree(ROOT / "pipelines/preprocessing", path)
    config = (path / "config.pbtxt").read_text().replace("engines/default", str(path))
    (path / "config.pbtxt").write_text(config.replace('name: "preprocessing"', f'name: "{path.name}"'))
    write_byte_level_tokenizer(path, 400)
    (path / "config.json").write_text(json.dumps({"build_config": {"max_seq_len": MAX_SEQ_LEN}}))
    if template:
        (path / "chat_template.jinja").write_text(template)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    repository = tmp_path_factory.mktemp("models")
    for name, datatype in DATATYPES.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(MODEL.format(datatype=datatype))
    for name, template in {**TEMPLATES, "preprocessing": ""}.items():
        write_preprocessing(repository / name, template)
    write_preprocessing(repository / ANY_LENGTH)
    (repository / ANY_LENGTH / "config.json").unlink()
    with tempfile.TemporaryDirectory() as temporary, tempfile.TemporaryDirectory() as scratch:
        own = Path(scratch, "own")
        own.write_bytes(MOST.pack(0.0))
        server = start_server(
            "--model-repository", str(repository), "--model-control-mode", "explicit", "--load-model", "*",
            "--allow-client-shm", "--request-memory", str(LIMIT_BYTES), "--request-memory-each", str(EACH_BYTES),
            env={**os.environ, "TMPDIR": temporary, "HOSTILE_LOOP": str(own)},
            program=(sys.executable, "-m", "tests.hostile.measured"),
        )  # fmt: skip
        yield Target(server, Path(temporary), own)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0
