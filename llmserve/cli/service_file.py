"""`llmserve serve --service FILE`: reads a service of Alibaba Cloud's PAI-EAS (JSON) whose processor is Triton.

Its `processor_params` are tritonserver's flags. The rest is the platform's: names, instances, memory, networks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmserve.cli.old_flags import Translation

FLAG = "--service"
PROCESSOR, PARAMS = "processor", "processor_params"


def read_services(arguments: Sequence[str]) -> Translation:
    """The command line, then the flags of the files that it names."""
    done = Translation(list(arguments))
    for file in _named(arguments):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            done.problems.append(f"{FLAG} {file} cannot be read as JSON: {error}")
            continue
        if not isinstance(content, dict):
            done.problems.append(f"{FLAG} {file} must be a JSON object with {PROCESSOR} and {PARAMS}")
            continue
        done.problems += [f"{FLAG} {file}: {problem}" for problem in _problems(content)]
        params = content.get(PARAMS)
        done.arguments += [str(param) for param in params] if isinstance(params, list) else []
        others = ", ".join(_keys({key: value for key, value in content.items() if key not in (PROCESSOR, PARAMS)}))
        done.without_effect += [f"{others} of {file} (the platform's)"] if others else []
    return done


def _named(arguments: Sequence[str]) -> Iterator[Path]:
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        flag, equals, value = argument.partition("=")
        if flag == FLAG:
            yield Path(value if equals else following)


def _problems(content: Mapping[str, Any]) -> Iterator[str]:
    processor, params = content.get(PROCESSOR), content.get(PARAMS)
    if processor != "triton":
        yield f"{PROCESSOR} must be triton, got {json.dumps(processor)}: no other processor is supported"
    if not isinstance(params, list) or not all(isinstance(param, str) for param in params):
        yield f"{PARAMS} must be a list of flags, such as --model-repository=DIR, got {json.dumps(params)}"


def _keys(content: Mapping[str, Any]) -> Iterator[str]:
    for key, value in content.items():
        yield from (f"{key}.{inner}" for inner in value) if isinstance(value, dict) and value else (key,)
