"""Converts flags of `vllm serve` to those of `llmserve serve`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

VALUES_WITHOUT_EFFECT = {
    "--dtype", "--max-model-len", "--max_model_len", "--max-num-seqs", "--gpu-memory-utilization", "--max-lora-rank",
    "--max-cpu-loras", "--lora-modules", "--max-logprobs", "--max-num-batched-tokens", "--tool-call-parser",
    "--reasoning-parser", "--structured-outputs-config.backend", "--port", "--load-format",
}  # fmt: skip
SWITCHES_WITHOUT_EFFECT = {
    "--enforce-eager", "--enable-lora", "--enable-auto-tool-choice", "--enable-prompt-tokens-details",
    "--no-enable-prefix-caching", "--enable-chunked-prefill", "--trust-remote-code", "--skip-tokenizer-init",
}  # fmt: skip
LACKED = {
    "--watermark-config": "watermarks",
}
# Only for reading answers: the demo network ends its answers in its own chat format.
TEMPLATES = {"Qwen/Qwen3": "Qwen-Qwen3-0.6B.jinja", "Qwen/Qwen2": "Qwen-Qwen2.5-7B-Instruct.jinja"}  # by network
FORMATS = {"--reasoning-parser": "reasoning_format", "--tool-call-parser": "tool_format"}  # none without the flag
SAME = {"--enable-per-request-metrics", "--return-tokens-as-token-ids", "--enable-force-include-usage"}  # as here


def translate(model: str, flags: Sequence[str], templates: Path) -> list[str]:
    made = ["--any-model-name"]
    if "--served-model-name" not in flags:
        made += ["--served-model-name", model]
    for family, file in TEMPLATES.items():
        if model.startswith(family) and not FORMATS.keys().isdisjoint(flags):
            made += ["--chat-template", str(templates / file)]
            break
    for flag, parameter in FORMATS.items():
        if flag not in flags:
            made += ["--parameter", f"preprocessing.{parameter}=none"]
    rest = list(flags)
    while rest:
        flag = rest.pop(0)
        if flag in ("--served-model-name", "--root-path"):
            made += [flag, rest.pop(0)]
        elif flag in SAME:
            made.append(flag)
        elif flag in VALUES_WITHOUT_EFFECT:
            rest.pop(0)
        elif flag not in SWITCHES_WITHOUT_EFFECT:
            raise RuntimeError(f"llmserve lacks: {LACKED.get(flag, flag)}")
    return made
