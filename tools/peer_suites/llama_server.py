"""What llama.cpp's suite starts in the place of llama-server: its flags, as those of `llmserve serve`.

`python -m tools.peer_suites.llama_server ENGINE FLAG...` A flag that asks for something llmserve does not have ends it
with a line that says so, which the report of `make peer-suites` quotes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

# What these choose is the same in each case, or of no effect on what is answered.
VALUES_WITHOUT_EFFECT = {
    "--temp", "--seed", "--model", "--model-url", "--hf-repo", "--hf-file", "--batch-size", "--ubatch-size",
    "--threads", "--n-gpu-layers", "--ctx-size", "--parallel", "-ctk", "-ctv", "-fa", "--n-predict",
    "--reasoning-format", "--reasoning", "--cache-ram", "--models-max",
}  # fmt: skip
SWITCHES_WITHOUT_EFFECT = {
    "--offline", "--cont-batching", "--no-slots", "--jinja", "--no-jinja", "--verbose", "--kv-unified", "--swa-full",
    "--metrics", "--no-cache-idle-slots", "--no-mmproj",
}  # fmt: skip
LACKED = {
    "--embedding": "embeddings: the suite's engine is a language model",
    "--reranking": "scores: the suite's engine is a language model",
    "--slots": "GET /slots",
    "--slot-save-path": "saved slots",
    "--context-shift": "context shift: a prompt or an answer ends at the context's length",
    "--chat-template": "a chat template named by a flag of the server",
    "--chat-template-file": "a chat template given by a flag of the server",
    "--model-draft": "a draft model",
    "--spec-type": "a choice of drafter by this flag",
    "--tags": "tags of models",
    "--lora": "LoRA adapters in GGUF",
    "--cors-origins": "CORS by a flag of the server",
}
LACKED_ALIASES = "several aliases of a model"


def main(arguments: Sequence[str]) -> None:
    engine, *flags = arguments
    translated, key = translate(flags)
    program = Path(sys.executable).with_name("llmserve")
    ports = ("--grpc-port", "0", "--metrics-port", "0")
    environment = {**os.environ, **({"LLMSERVE_API_KEY": key} if key else {})}
    os.execve(program, [str(program), "serve", engine, *ports, *translated], environment)


def translate(flags: Sequence[str]) -> tuple[list[str], str]:
    """llmserve's flags, and the API key. Without `--offline` models are only fetched beforehand: anything will do."""
    made = ["--any-model-name"]  # llama-server does not look at it
    key = ""
    rest = list(flags)
    while rest:
        flag = rest.pop(0)
        if flag in ("--host", "--port"):
            value = rest.pop(0)
            if "," in value:
                lack(flag, "several addresses")
            made += [{"--host": "--host", "--port": "--http-port"}[flag], value]
        elif flag == "--alias":
            name = rest.pop(0)
            if "," in name:
                lack(flag, LACKED_ALIASES)
            made += ["--served-model-name", name]
        elif flag == "--api-key":
            key = rest.pop(0)
        elif flag == "--no-ui":
            made.append("--no-allow-web-page")
        elif flag in VALUES_WITHOUT_EFFECT:
            rest.pop(0)
        elif flag in SWITCHES_WITHOUT_EFFECT:
            continue
        elif "--offline" in flags:
            lack(flag, LACKED.get(flag, ""))
        elif rest and not rest[0].startswith("-"):
            rest.pop(0)
    return made, key


def lack(flag: str, what: str) -> None:
    raise SystemExit(f"llmserve lacks: {what or flag}")


if __name__ == "__main__":
    main(sys.argv[1:])
