"""The program that llama.cpp's suite starts instead of llama-server: it converts flags to those of `llmserve serve`.

`python -m tools.peer_suites.llama_server ENGINE FLAG...` For a flag whose feature llmserve does not have, it prints a
line that the report of `make peer-suites` quotes, and ends. Cases with the same flags share a server.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Sequence

from tools.peer_suites.shared_server import SERVERS, forward, port_of

# Flags that have the same value in every case, or do not affect answers.
VALUES_WITHOUT_EFFECT = {
    "--model", "--model-url", "--hf-repo", "--hf-file", "--batch-size", "--ubatch-size",
    "--threads", "--n-gpu-layers", "--ctx-size", "--parallel", "-ctk", "-ctv", "-fa", "--n-predict",
    "--reasoning-format", "--cache-ram", "--models-max",
}  # fmt: skip
SAMPLING = {"--temp": "temperature", "--seed": "seed"}
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
    "--model-draft": "a draft model",
    "--spec-type": "a choice of drafter by this flag",
    "--tags": "tags of models",
    "--lora": "LoRA adapters in GGUF",
}
LACKED_ALIASES = "several aliases of a model"
VALUES = "--default-chat-template-kwargs"


def main(arguments: Sequence[str]) -> None:
    engine, *flags = arguments
    host, port = (flags[flags.index(flag) + 1] for flag in ("--host", "--port"))
    translated, key = translate(flags)
    target = port_of(engine, translated, {"LLMSERVE_API_KEY": key} if key else {})
    asyncio.run(forward(host, int(port), target))


def translate(flags: Sequence[str]) -> tuple[list[str], str]:
    """Returns llmserve's flags without its address, and the API key. Without `--offline`, the suite only fetches
    models, so any flags will do."""
    made = ["--any-model-name", "--parameter", "preprocessing.template_dates=true"]  # llama-server's behaviour
    sampling: dict[str, float] = {}
    key = ""
    rest = list(flags)
    while rest:
        flag = rest.pop(0)
        if flag in ("--host", "--port"):
            value = rest.pop(0)
            if "," in value:
                lack(flag, "several addresses")
        elif flag == "--alias":
            name = rest.pop(0)
            if "," in name:
                lack(flag, LACKED_ALIASES)
            made += ["--served-model-name", name]
        elif flag == "--api-key":
            key = rest.pop(0)
        elif flag == "--chat-template-file":
            made += ["--chat-template", rest.pop(0)]
        elif flag == "--chat-template":
            template = rest.pop(0)
            made += ["--chat-template", written(template) if " " in template else template]
        elif flag == "--reasoning":
            made += [VALUES, json.dumps({"enable_thinking": rest.pop(0) != "off"})]
        elif flag == "--cors-origins":
            made += ["--cors-allow-origin", rest.pop(0)]
        elif flag in SAMPLING:
            sampling[SAMPLING[flag]] = json.loads(rest.pop(0))
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
    if "--cors-origins" not in flags:
        made += ["--cors-allow-origin", "*", "--cors-allow-credentials"]  # llama-server's default
    return [*made, "--default-sampling", json.dumps(sampling)], key


def written(template: str) -> str:
    """Writes the template to a file, and returns its path."""
    SERVERS.mkdir(parents=True, exist_ok=True)
    path = SERVERS / f"{hashlib.sha256(template.encode()).hexdigest()[:16]}.jinja"
    path.write_text(template)
    return str(path)


def lack(flag: str, what: str) -> None:
    raise SystemExit(f"llmserve lacks: {what or flag}")


if __name__ == "__main__":
    main(sys.argv[1:])
