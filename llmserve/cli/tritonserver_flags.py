"""tritonserver's command line for `llmserve serve`: in a launch script, only the program's name must be changed.

Most flags have the same name here. The rest is translated before the command is parsed: booleans with a value
(`--exit-on-error=false`), older names, and flags without an effect here, which are reported in one line. A flag is
rejected if the service would differ without it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from llmserve.cli.old_flags import Translation

OWN_BOOLEANS = (
    "allow-http", "allow-grpc", "allow-metrics", "allow-cpu-metrics", "allow-gpu-metrics", "strict-readiness",
    "exit-on-error", "log-info", "log-warning", "log-error", "grpc-use-ssl", "grpc-use-ssl-mutual",
    "http-use-ssl", "http-use-ssl-mutual", "metrics-use-ssl",  # named after those: tritonserver has none of them
    "grpc-keepalive-permit-without-calls", "allow-client-shm", "allow-web-page",
    "reuse-http-port", "reuse-grpc-port",
)  # fmt: skip
WORDS = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}

# without effect, by what they change in tritonserver
NO_EFFECT = {
    "GPU memory and devices": (
        "pinned-memory-pool-byte-size", "cuda-memory-pool-byte-size", "cuda-virtual-address-size",
        "min-supported-compute-capability", "model-load-gpu-limit", "enable-peer-access",
    ),
    "threads and pools of tritonserver's own": (
        "http-thread-count", "grpc-infer-thread-count", "grpc-infer-allocation-pool-size",
        "grpc-max-response-pool-size", "buffer-manager-thread-count", "host-policy",
    ),
    "shared libraries": ("backend-directory", "repoagent-directory", "cache-directory"),
    "connections": (
        "grpc-http2-max-pings-without-data", "grpc-http2-min-recv-ping-interval-without-data",
        "grpc-http2-max-ping-strikes",
    ),
    "traces, whose one flag is --trace-config": (
        "trace-file", "trace-level", "trace-rate", "trace-count", "trace-log-frequency",
    ),
    "loading": ("model-load-retry-count",),
    "other clouds' services": (
        "sagemaker-port", "sagemaker-safe-port-range", "sagemaker-thread-count", "vertex-ai-address",
        "vertex-ai-port", "vertex-ai-thread-count", "vertex-ai-default-model",
    ),
}  # fmt: skip
REFUSED = {
    "model-namespacing": "models of the same name cannot be served side by side",
    "allow-sagemaker": "this service is not supported",
    "allow-vertex-ai": "this service is not supported",
}
BOOLEANS = frozenset((*OWN_BOOLEANS, "strict-model-config", "enable-peer-access", *REFUSED))
_SUBJECTS = {flag: subject for subject, flags in NO_EFFECT.items() for flag in flags}
KNOWN = BOOLEANS | REFUSED.keys() | _SUBJECTS.keys() | {"response-cache-byte-size", "log-verbose"}


def translate(arguments: Sequence[str]) -> Translation:
    """Translate flags, written `--flag value` or `--flag=value`. Other arguments pass unchanged."""
    done = Translation()
    rest = deque(arguments)
    while rest:
        argument = rest.popleft()
        if argument == "--":
            done.arguments += [argument, *rest]
            break
        flag, _, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or flag not in KNOWN:
            done.arguments.append(argument)
            continue
        if "=" not in argument and rest and (flag not in BOOLEANS or rest[0].lower() in WORDS):
            value = rest.popleft()
        _translate(flag, value, done)
    return done


def _translate(flag: str, value: str, done: Translation) -> None:
    if flag in _SUBJECTS:
        done.without_effect.append(f"--{flag} ({_SUBJECTS[flag]})")
        return
    if flag == "response-cache-byte-size":
        done.arguments.append(f"--cache-config=local,size={value}")
        return
    if flag == "log-verbose":
        level = int(WORDS[value.lower()]) if value.lower() in ("true", "false") else value
        done.arguments.append(f"--log-verbose={level}")
        return
    if value and value.lower() not in WORDS:
        done.problems.append(f"--{flag}={value}: expected true or false")
        return
    is_true = WORDS.get(value.lower(), True)
    if flag == "strict-model-config":
        done.arguments += ["--disable-auto-complete-config"] if is_true else []
    elif flag in REFUSED:
        done.problems += [f"--{flag} is not supported: {REFUSED[flag]}"] if is_true else []
    else:
        done.arguments.append(f"--{flag}" if is_true else f"--no-{flag}")
