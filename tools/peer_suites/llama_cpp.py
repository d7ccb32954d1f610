"""llama.cpp's tests of its server, from llama-cpp-python's source distribution."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.peer_suites.cases import Rules
from tools.peer_suites.sdist import FOLDER, ROOT, Sdist, environment
from tools.peer_suites.shared_server import end_all

SDIST = Sdist(
    "llama_cpp_python-0.3.36", 77, "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    "ec/e9/e7de2b0463ea3ffbf0ede6cb21b58c1258a8f6521aae45ca773a59fe7cf3",
    ("vendor/llama.cpp/tools/server/tests/", "vendor/llama.cpp/models/templates/"),
)  # fmt: skip
TESTS = SDIST.folder / "vendor/llama.cpp/tools/server/tests"
TEMPLATES = SDIST.folder / "vendor/llama.cpp/models/templates"
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
# Failing lines that compare answers of the suite's own network, which is not the one used here.
OWN_NETWORK = re.compile(
    r"match_regex|n_prompt|n_predicted|n_cache|cached_tokens|re_content|prompt_n|predicted_n|bosId"
)
CANNOT: Mapping[str, str] = {
    "test_local_media_file|_with_image|_vision_": "images",
    "with_tools_enabled|test_cors_proxy": "tools and MCP run by the server",
    "test_nocache_long_input_prompt": "a context of 256 tokens (the demo engine has 512)",
    "test_access_static_assets": "the files of its own page",
    "test_load_split_model|test_server_props": "a GGUF file of its own network",
    "slots|test_cancel_request|test_completion_unified": "slots",
    "test_metrics.py": "the names of its own metrics",
    "test_chat_completion_stream|test_chat_completion.*chatml": "a system_fingerprint with its build number",
    r"test_chat_completion.py::test_chat_template$": "the debugging output of its implementation",
    "test_context_size_exceeded": "a context of 256 tokens (the demo engine has 512)",
    "test_return_progress": "the text or the token counts of the suite's own network",
}
# Patterns of the failing line and its message.
WANTS: Mapping[str, str] = {
    r"startswith\(\"b\"\)": "a system_fingerprint with its build number",
    r"gaierror|NameResolution|huggingface": "a download by the test",
    r"== '<s> I believ": "the text or the token counts of the suite's own network",
    r"__verbose": "the debugging output of its implementation",
}
REASONS: Mapping[str, str] = {
    r"KeyError: 'timings'": "timings in every answer (here where timings_per_token asks for them)",
    r"non empty content delta|'' is None": "null as the first piece of a stream (here an empty text, as OpenAI's)",
    r"'Authorization' == '\*'": "every header allowed by * (here those that the page asks for)",
    r"200 == 400 or 200 == 500": "a refusal of two messages of the assistant at the end (here continued)",
    r"progress": "prompt_progress",
    r"'content' in \{|KeyError: 'content'": "its own form of POST /completions (here OpenAI's)",
    r"post_sampling|top_probs": "probabilities after sampling",
}
RULES = Rules(CANNOT, WANTS, REASONS, OWN_NETWORK)


def run(engine: Path, files: Sequence[str] | None, expression: str, report: Path) -> None:
    SDIST.fetch()
    python = environment("llama-venv", ("-r", str(TESTS / "requirements.txt")))
    program = FOLDER / "llama-server"
    started = f'{sys.executable} -m tools.peer_suites.llama_server {engine} "$@"'
    program.write_text(f"#!/bin/sh\nPYTHONPATH={ROOT}:$PYTHONPATH exec {started}\n")
    program.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    chosen = files or sorted(path.name for path in TESTS.glob("unit/test_*.py") if path.name not in NOT_ASKED)
    command = [
        str(python), "-m", "pytest", "-q", "-m", "not slow", "--tb=long", "-o", "junit_logging=all",
        f"--junitxml={report}", *(["-k", expression] if expression else []), *(f"unit/{name}" for name in chosen),
    ]  # fmt: skip
    own = {"LLAMA_SERVER_BIN_PATH": str(program), "PORT": port}
    try:
        subprocess.run(command, cwd=TESTS, env={**os.environ, **own}, check=False)
    finally:
        end_all()
