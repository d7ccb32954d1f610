"""vLLM's tests of its APIs of OpenAI and Anthropic, from its source distribution.

Their imports of vLLM have stand-ins (`vllm_stand_ins`). Cases without a server are left out: they test functions.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.peer_suites import llama_cpp
from tools.peer_suites.cases import Rules
from tools.peer_suites.sdist import FOLDER, ROOT, Sdist, environment

SDIST = Sdist(
    "vllm-0.33.0", 47, "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
    "f7/25/aa5684e9c59d6fc75f78926b7f15e8d9adc7de2d9e6e7575b80776ad8169",
    (
        "tests/__init__.py", "tests/entrypoints/__init__.py", "tests/entrypoints/conftest.py",
        "tests/entrypoints/openai/", "tests/entrypoints/anthropic/",
    ),
)  # fmt: skip
REQUIREMENTS = (
    "pytest", "pytest-asyncio", "openai==2.54.0", "anthropic==0.125.0", "requests", "httpx", "regex", "jsonschema",
    "pybase64", "mcp",
)  # fmt: skip
ENTRY_POINTS = SDIST.folder / "tests/entrypoints"
# Files that start a server; the others test functions of vLLM without one.
ASKED = (
    "anthropic/test_messages.py",
    *(
        f"openai/{name}.py"
        for name in (
            "chat_completion/test_batched_chat_completions", "chat_completion/test_chat",
            "chat_completion/test_chat_completion", "chat_completion/test_chat_echo",
            "chat_completion/test_chat_logit_bias_validation", "chat_completion/test_completion_with_function_calling",
            "chat_completion/test_enable_force_include_usage", "chat_completion/test_include_reasoning",
            "chat_completion/test_logprob_token_ids", "chat_completion/test_root_path",
            "completion/test_completion", "completion/test_prompt_validation", "completion/test_token_in_token_out",
            "models/test_models", "responses/test_basic", "responses/test_function_call", "responses/test_simple",
            "responses/test_stateful", "responses/test_structured_output", "test_chunked_prompt",
            "test_return_token_ids", "test_return_tokens_as_ids",
        )
    ),
)  # fmt: skip
# Files that start a server for other features: images, prompts as vectors, gpt-oss and its tools, several GPUs.
NOT_ASKED = (
    "test_chat_completion_with_prompt_embeds", "test_completion_with_prompt_embeds", "test_extra_content_fields",
    "test_harmony", "test_lmeval", "test_mcp_tools", "test_openai_schema", "test_parsable_context",
    "test_serving_chat", "test_tensorizer_entrypoint", "test_thinking_token_budget", "test_decisions_e2e",
)  # fmt: skip
CONTEXT = "a context of more than 512 tokens (the demo engine's)"
ITS_OWN = "the text, the tokens or the calls of the suite's own networks"
CANNOT: Mapping[str, str] = {
    r"test_basic.py::test_(simple_input|instructions|chat)$": ITS_OWN,
    r"test_chat.py::test_(complex_message_content|response_format_json|structured_outputs_(choice|json)_chat)": ITS_OWN,
    r"test_chat.py::test_(more_than_one_prompt_logprobs_chat|single_chat_session)": ITS_OWN,
    r"test_chat_echo.py::test_top_logprobs": "functions of vLLM, without a server",
    r"test_completion.py::test_(single_completion|echo_logprob_completion)": ITS_OWN,
    r"test_messages.py::test_(simple_messages|system_message|anthropic_tool_call)$": ITS_OWN,
    r"test_include_reasoning.py": ITS_OWN,
    r"test_simple.py::test_(.*reasoning.*|max_tokens)": ITS_OWN,
    r"test_structured_output.py": ITS_OWN,
    r"test_function_call.py::.*(expected_arguments|forced_tool_choice\[auto)": ITS_OWN,
    r"test_return_token_ids.py::test_chat_completion_with_": ITS_OWN,
    r"forced_tool_choice\[required|test_named_tool_use": CONTEXT,
    r"test_models.py": "a LoRA adapter from a hub",
}
# Patterns of the failing line and its message.
WANTS: Mapping[str, str] = {
    r"'(John|Mark)' in": ITS_OWN,
    r"functions of vLLM": "functions of vLLM, without a server",
    r"prompt is too long": CONTEXT,
    r"'(response\.)?incomplete' ==|'length' == 'stop'|ResponseCompletedEvent|Unclosed events": ITS_OWN,
    r"Regex pattern did not match|greater_than_equal": "the words of its error messages",
    r"hf_api|from_pretrained|huggingface": "a download by the test",
}
REASONS: Mapping[str, str] = {
    r"DID NOT RAISE": "a refusal of stream_options without stream (here a warning)",
    r">\s+assert delta.content": "text in the chunk with the finish reason (here none, as OpenAI's)",
    r"beam search": "beam search",
    r"'role' must be": "roles that the API does not know",
    r"(top|prompt)_logprobs: must be at least 0": "log probs of the whole vocabulary (-1)",
    r"input_messages": "enable_response_messages",
}
RULES = Rules(CANNOT, WANTS, REASONS)


def run(engine: Path, files: Sequence[str] | None, expression: str, report: Path) -> None:
    SDIST.fetch()
    llama_cpp.SDIST.fetch()  # has the chat templates of the networks in vLLM's tests
    python = environment("vllm-venv", REQUIREMENTS)
    chosen = [path for path in ASKED if not files or Path(path).name in files]
    settings = FOLDER / "vllm.ini"  # replaces this repository's
    settings.write_text("[pytest]\nasyncio_mode = strict\njunit_logging = all\n")
    command = [
        str(python), "-m", "pytest", "-q", "-c", str(settings), "-p", "tools.peer_suites.vllm_stand_ins",
        "-p", "no:cacheprovider", "--tb=long", "--confcutdir", str(ENTRY_POINTS),
        f"--rootdir={SDIST.folder}", f"--junitxml={report}", *(["-k", expression] if expression else []),
        *(str(ENTRY_POINTS / path) for path in chosen),
    ]  # fmt: skip
    own = {
        "PEER_ENGINE": str(engine), "PEER_TEMPLATES": str(llama_cpp.TEMPLATES),
        "PEER_PROGRAM": str(Path(sys.executable).with_name("llmserve")),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }  # fmt: skip
    subprocess.run(command, cwd=SDIST.folder, env={**os.environ, **own}, check=False)
