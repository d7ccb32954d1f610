"""Every command in the documentation is run, as a reader would: block by block, in the order of the page.

A block fenced with ```bash runs to its end and must exit 0. One fenced with ```bash background is a server: it is
started, and stays up for the rest of its page. One fenced with ```output shows lines, or parts of lines, that the block
before it prints. `make` lines are checked with `make -n` (the suite itself runs inside `make test`). The page runs in a
scratch folder where the repository's files are linked, so that engines and reports land there.

What is not the reader's, for the minutes that it takes: a suite has NUM_SAMPLES at most, with margins as much wider as
so few need, and `llmserve eval` asks SERVED_SAMPLES as they are served, of README.md only. Tests of the tier `gate` ask
more. Where it can, a page has a network of its own: the ports of its server may be taken here.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from llmserve.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
GUIDES = sorted((ROOT / "docs").glob("*.md"))
EXAMPLES = sorted((ROOT / "docs/examples").rglob("README.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *GUIDES, *EXAMPLES]  # README_zh.md has the README's commands
LINKED = (
    "README.md",
    "Makefile",
    "pyproject.toml",
    "build",
    "pipelines",
    "pipelines-embeddings",
    "docs",
    "tools",
    "llmserve",
    "tests",
    "deploy",
)
FENCE = re.compile(r"^```(bash|bash background|output)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = ("git clone", "pip install", "python3.11 -m venv", ". .venv", "cd ")  # set-up that the suite itself stands on
BLOCK_TIMEOUT_S = 240
DEMO = "baichuan2-tiny-docsum"
NUM_SAMPLES, WIDER_MARGINS = 60, 5.0
EVERY_SAMPLE = ("releasing.md",)  # whose int4 engine passes by the first 60
SERVED_SAMPLES = 4
PROGRAM = f"""#!/bin/sh
[ "$1" != eval ] || set -- "$@" $AS_SERVED
exec {Path(sys.executable).parent}/llmserve "$@"
"""


def blocks(page: Path) -> list[tuple[str, str]]:
    return [(match[1], match[2]) for match in FENCE.finditer(page.read_text())]


def runnable(script: str) -> str:
    lines = [line for line in script.splitlines() if not line.startswith(NOT_RUN)]
    return "\n".join(re.sub(r"^make\b", f"make -n -C {ROOT}", line) for line in lines)


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    for name in LINKED:
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/llmserve").write_text(PROGRAM)
    (tmp_path / "bin/llmserve").chmod(0o755)
    return tmp_path


def copy_suites(folder: Path, *, with_every_sample: bool) -> None:
    shutil.copytree(ROOT / "eval", folder)
    for path in (folder / "suites").glob("*.yaml"):
        suite = yaml.safe_load(path.read_text())
        if suite["num_samples"] > NUM_SAMPLES and not with_every_sample:
            margins = {name: WIDER_MARGINS * margin for name, margin in suite.get("margins", {}).items()}
            path.write_text(yaml.safe_dump(suite | {"num_samples": NUM_SAMPLES, "margins": margins}))


@pytest.fixture
def environment(scratch: Path, page: Path) -> dict[str, str]:
    path = f"{scratch}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    as_served = f"--served-samples {SERVED_SAMPLES}" if page == PAGES[0] else "--no-as-served"
    return {**os.environ, "PATH": path, "COLUMNS": "120", "AS_SERVED": as_served}


@pytest.fixture
def network() -> Iterator[list[str]]:
    """What a command begins with that is run in this page's own network; empty where a user may make none."""
    script = "ip link set lo up && echo up && exec sleep infinity"
    command = ["unshare", "--map-root-user", "--net", "sh", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as owner:
        assert owner.stdout is not None
        is_up = owner.stdout.readline() == "up\n"
        yield ["nsenter", f"--target={owner.pid}", "--user", "--net", "--preserve-credentials"] if is_up else []
        owner.kill()


def wait_until_ready(server: subprocess.Popen[bytes], network: list[str]) -> None:
    for _ in range(600):
        assert server.poll() is None, "the server of this page ended at once"
        if subprocess.run([*network, "curl", "-sf", "127.0.0.1:8000/v2/health/ready"]).returncode == 0:
            return
        time.sleep(0.1)
    pytest.fail("the server of this page was not ready within a minute")


@pytest.fixture
def servers(network: list[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for server in started:
        os.killpg(server.pid, signal.SIGTERM)
        assert server.wait(timeout=60) in (0, -signal.SIGTERM)


@pytest.fixture(scope="module")
def demo_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built once: each page has a copy, which it may change."""
    engine = tmp_path_factory.mktemp("demo") / "engine"
    command = f"{Path(sys.executable).parent}/llmserve build build/checkpoints/{DEMO} --output-dir".split()
    subprocess.run([*command, engine], cwd=ROOT, check=True, capture_output=True)
    return engine


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_work(
    page: Path,
    scratch: Path,
    environment: dict[str, str],
    network: list[str],
    servers: list[subprocess.Popen[bytes]],
    demo_engine: Path,
) -> None:
    copy_suites(scratch / "eval", with_every_sample=page.name in EVERY_SAMPLE)
    if page not in EXAMPLES and blocks(page):  # examples build what they need
        shutil.copytree(demo_engine, scratch / f"engines/{DEMO}-fp16")
    printed = ""
    for kind, script in blocks(page):
        if kind == "output":
            missing = [line for line in script.splitlines() if line not in printed]
            assert missing == [], f"{page.name} shows what was not printed: {missing}\n{printed[-3000:]}"
            continue
        command = [*network, "bash", "-euo", "pipefail", "-c", runnable(script)]
        if kind == "bash background":
            servers.append(subprocess.Popen(command, cwd=scratch, env=environment, start_new_session=True))
            wait_until_ready(servers[-1], network)
            continue
        done = subprocess.run(
            command, cwd=scratch, env=environment, capture_output=True, text=True, timeout=BLOCK_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, f"{page.name}:\n{script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        printed = done.stdout


def test_commands_in_other_fences_exist_with_their_flags() -> None:
    """Examples that are shown but not run: at least the command and every flag of them is real."""
    commands: Any = typer.main.get_command(app)
    for page in PAGES:
        for language, fence in re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            if language:
                continue
            for line in re.findall(r"^(?:\$ )?llmserve (.*)$", fence, re.MULTILINE):
                name, *arguments = shlex.split(line)
                known = {flag for parameter in commands.commands[name].params for flag in parameter.opts}
                spelled = commands.commands[name].context_settings.get("token_normalize_func", str)
                assert {spelled(word.partition("=")[0]) for word in arguments if word.startswith("--")} <= known, line


def test_the_readme_shows_answers() -> None:
    """To the first prompt, before anything is served, and to the others."""
    kinds = [kind for kind, _ in blocks(ROOT / "README.md")]
    assert "output" in kinds[: kinds.index("bash background")]
    assert "output" in kinds[kinds.index("bash background") :]


def test_the_diffs_that_contributing_shows_are_in_the_files() -> None:
    shown = re.findall(
        r"^```diff\n\+\+\+ (\S+)\n(.*?)^```$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert [path for path, _ in shown] == [
        "llmserve/models/olmo2.py",
        "llmserve/models/registry.py",
        "tests/checkpoints.py",
        "llmserve/models/program.py",
        "llmserve/models/graph.py",
        "llmserve/builder/attention.py",
        "llmserve/builder/reference.py",
        "llmserve/builder/targets/cpu/lowering.py",
        "llmserve/engine/cpu/op_codes.py",
        "llmserve/engine/cpu/kernels/format.h",
        "llmserve/engine/cpu/kernels/program_check.cpp",
        "llmserve/engine/cpu/kernels/executor.cpp",
        "llmserve/engine/cpu/kernels/rowwise.cpp",
        "tests/engine/cpu/kernels/test_main.cpp",
        "tests/engine/cpu/networks.py",
    ]
    for path, diff in shown:
        rest = (ROOT / path).read_text()
        for piece in re.sub(r"^\+", "", diff, flags=re.MULTILINE).split("...\n"):
            _, found, rest = rest.partition(piece)
            assert found, f"{path} has not, or not in this place:\n{piece}"


def test_every_guide_is_listed_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [page.name for page in GUIDES if f"docs/{page.name}" not in readme] == []


def test_the_chinese_readme_says_the_same() -> None:
    """The same commands with the same answers, links to the same pages, and as many headings and rows."""
    pages = [(ROOT / name).read_text() for name in ("README.md", "README_zh.md")]
    fences = [re.findall(r"^```.*?^```$", page, re.MULTILINE | re.DOTALL) for page in pages]
    assert fences[0] == fences[1]
    links = [set(re.findall(r"\]\((?!README)([^)]*)\)", page)) for page in pages]
    assert links[0] == links[1]
    for mark in ("## ", "| ", "* "):
        counts = [len(re.findall(f"^{re.escape(mark)}", page, re.MULTILINE)) for page in pages]
        assert counts[0] == counts[1], mark


@cache
def messages() -> frozenset[str]:
    """Every text in the code, with … for what is put into it."""
    return frozenset(_messages())


def _messages() -> Iterator[str]:
    for path in (ROOT / "llmserve").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def column(page: Path, heading: str) -> list[str]:
    """The cells under a heading, of every table of a page that has it."""
    cells: list[str] = []
    index = -1
    for line in page.read_text().splitlines():
        row = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("|"):
            index = -1
        elif heading in row:
            index = row.index(heading)
        elif index >= 0 and not line.startswith("|-"):
            cells.append(row[index])
    return cells


def quoted(cells: list[str]) -> list[str]:
    return [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]


def test_troubleshooting_quotes_what_the_code_says() -> None:
    seen = quoted([cell for cell in column(ROOT / "docs/troubleshooting.md", "You see") if "CMake" not in cell])
    known = messages()
    assert len(seen) > 30
    assert [text for text in seen if not any(text in message for message in known)] == []


def test_migrating_names_flags_and_metrics_that_exist() -> None:
    """The columns of ours; what `build` has is written with its name."""
    named = quoted(column(ROOT / "docs/migrating.md", "llmserve"))
    commands: Any = typer.main.get_command(app)
    flags = [text for text in named if text.startswith(("--", "build --"))]
    assert len(flags) > 15
    for text in flags:
        command = "build" if text.startswith("build ") or text == "--target tensorrt_llm" else "serve"
        known = {flag for parameter in commands.commands[command].params for flag in parameter.opts}
        assert text.removeprefix("build ").split()[0] in known, text
    families = {text for text in named if text.startswith(("nv_", "llmserve_"))}
    assert len(families) > 8
    assert families <= messages()
