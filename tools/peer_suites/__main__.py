"""llama.cpp's own tests of its server, unmodified, with `llmserve serve` in the server's place: `make peer-suites`.

The suite comes out of llama-cpp-python's source distribution, which is fetched, checked and taken apart, never built;
nothing of it is kept here. Each case has passed, failed, or lacks something that llmserve does not have.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import socket
import subprocess
import sys
import tarfile
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".peer-suites"
PACKAGE = "llama_cpp_python-0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
ADDRESS = (
    "https://files.pythonhosted.org/packages/ec/e9/e7de2b0463ea3ffbf0ede6cb21b58c1258a8f6521aae45ca773a59fe7cf3/"
    f"{PACKAGE}.tar.gz"
)
INSIDE = f"{PACKAGE}/vendor/llama.cpp/"
TESTS = FOLDER / INSIDE / "tools/server/tests"
WANTED = (f"{INSIDE}tools/server/tests/", f"{INSIDE}models/templates/")
# Files that are all about something that there is none of here, or that download a network.
NOT_ASKED = {
    "test_compat_gcp.py": "Vertex AI's environment",
    "test_ctx_shift.py": "context shift",
    "test_embedding.py": "embeddings of a language model (encoders have /v1/embeddings)",
    "test_infill.py": "infilling",
    "test_kv_keep_only_active.py": "slots",
    "test_lora.py": "LoRA adapters in GGUF",
    "test_mcp_servers.py": "MCP run by the server",
    "test_proxy.py": "a proxy for the page",
    "test_rerank.py": "a reranker in GGUF (cross-encoders have /v1/rerank)",
    "test_router.py": "a router of model processes",
    "test_sleep.py": "an engine that unloads when idle",
    "test_slot_save.py": "saved slots",
    "test_speculative.py": "a draft model",
    "test_stream.py": "streams that its router resumes",
    "test_tools_builtin.py": "tools run by the server",
    "test_vision_api.py": "images",
}
ITS_OWN = "the text or the token counts of its own network"
LACKS = re.compile(r"llmserve lacks: (.+)")
ROUTE = re.compile(r'"(?:GET|POST|OPTIONS|DELETE)",\s*"(/[^"]*)"')
MESSAGE = re.compile(r'"message": "((?:[^"\\]|\\.)*)"')
# What a failing line compares: answers of the network that the suite comes with, which this is not.
OWN_NETWORK = re.compile(
    r"match_regex|n_prompt|n_predicted|n_cache|cached_tokens|re_content|prompt_n|predicted_n|bosId"
)
# Of the line that failed and what it said.
REASONS: Mapping[str, str] = {
    r"__verbose": "__verbose: the prompt in an answer",
    r"[\"']timings": "timings in every answer (here where timings_per_token asks for them)",
    r"progress": "prompt_progress",
    r"startswith\(\"b\"\)": "a system_fingerprint that begins with b",
    r"'' is None": "null as the first piece of a stream (here an empty text, as OpenAI's)",
    r"exceed_context_size_error": "its error type of long prompts (here OpenAI's)",
    r"'content' in \{|KeyError: 'content'": "its own form of POST /completions (here OpenAI's)",
    r"Process-Start-Time-Unix|200 == 501": "its headers of /metrics and the flag for it",
    r"sw\.js": "the files of its page",
    r"gaierror|NameResolution|huggingface": "a download by the test",
    r"chat template has none|this checkpoint knows": "a network that was taught tools and other roles",
}


@dataclass(frozen=True)
class Case:
    file: str
    name: str
    result: str  # passed, failed or lacks
    reason: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.peer_suites", description=__doc__)
    parser.add_argument("engine", type=Path, help="of a language model")
    parser.add_argument("--files", nargs="*", help="names of the suite's files; those that apply by default")
    options = parser.parse_args()
    fetch()
    python = environment()
    files = options.files or sorted(path.name for path in TESTS.glob("unit/test_*.py") if path.name not in NOT_ASKED)
    report = FOLDER / f"report-{os.getpid()}.xml"
    run(python, options.engine.resolve(), files, report)
    cases = [case_of(element) for element in ElementTree.parse(report).iter("testcase")]
    print(table(cases))
    raise SystemExit(0 if any(case.result == "passed" for case in cases) else 1)


def fetch() -> None:
    if TESTS.is_dir():
        return
    FOLDER.mkdir(exist_ok=True)
    print(f"fetching {PACKAGE} (77 MB)", flush=True)
    archive = FOLDER / f"{PACKAGE}.tar.gz"
    urllib.request.urlretrieve(ADDRESS, archive)
    with archive.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != SHA256:
        archive.unlink()
        raise SystemExit(f"{ADDRESS} has SHA-256 {found} instead of {SHA256}; it is not kept")
    with tarfile.open(archive) as members:
        members.extractall(FOLDER, [each for each in members if each.name.startswith(WANTED)], filter="data")
    archive.unlink()


def environment() -> Path:
    """With what the suite requires."""
    venv = FOLDER / "venv"
    if not (venv / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
        pip = [str(venv / "bin/python"), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        subprocess.run([*pip, "-r", str(TESTS / "requirements.txt")], check=True)
        (venv / "complete").touch()
    return venv / "bin/python"


def run(python: Path, engine: Path, files: Sequence[str], report: Path) -> None:
    program = FOLDER / "llama-server"
    started = f'{sys.executable} -m tools.peer_suites.llama_server {engine} "$@"'
    program.write_text(f"#!/bin/sh\nPYTHONPATH={ROOT}:$PYTHONPATH exec {started}\n")
    program.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    environment = {**os.environ, "LLAMA_SERVER_BIN_PATH": str(program), "PORT": port}
    command = [
        str(python), "-m", "pytest", "-q", "-m", "not slow", "--tb=long", "-o", "junit_logging=all",
        f"--junitxml={report}", *(f"unit/{name}" for name in files),
    ]  # fmt: skip
    subprocess.run(command, cwd=TESTS, env=environment, check=False)


def case_of(element: ElementTree.Element) -> Case:
    file = element.get("classname", "").rpartition(".")[2] + ".py"
    found = {kind: element.find(kind) for kind in ("failure", "error", "skipped")}
    name = element.get("name", "")
    if found["skipped"] is not None:
        return Case(file, name, "lacks", f"skipped by the suite: {found['skipped'].get('message', '')}")
    problem = found["failure"] if found["failure"] is not None else found["error"]
    if problem is None:
        return Case(file, name, "passed")
    printed = "\n".join(text or "" for text in (element.findtext("system-out"), element.findtext("system-err")))
    return Case(file, name, *verdict(problem.text or "", printed))


def verdict(problem: str, printed: str) -> tuple[str, str]:
    """Of a case that has not passed; `problem`: the function up to the line that failed, and what it said."""
    if lacked := LACKS.search(printed):
        return "lacks", lacked[1]
    lines = problem.splitlines()
    raised = next((line for line in reversed(lines) if line.startswith(">")), "")
    said = next((line[2:].strip() for line in lines if line.startswith("E ")), lines[-1] if lines else "")
    for pattern, reason in REASONS.items():
        if re.search(pattern, f"{raised}\n{said}"):
            return "lacks", reason
    if '"OPTIONS"' in problem:
        return "lacks", "CORS for every origin (here for those of --cors-allow-origin)"
    if OWN_NETWORK.search(raised):
        return "lacks", ITS_OWN
    routes = ROUTE.findall(problem)
    if "404" in said and routes:
        return "lacks", f"route {routes[-1]}"
    messages = MESSAGE.findall(printed)
    if "400" in said and messages:
        return "lacks", f"refused: {messages[-1]}"
    return "failed", said


def table(cases: Sequence[Case]) -> str:
    counts = Counter(case.result for case in cases)
    told = ", ".join(f"{counts[each]} {each}" for each in ("passed", "failed", "lacks"))
    lines = [f"{len(cases)} cases: {told}", ""]
    reasons = Counter((case.file, case.result, case.reason) for case in cases if case.result != "passed")
    for (file, result, reason), count in sorted(reasons.items()):
        lines.append(f"{file}: {count} {result}: {reason}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
