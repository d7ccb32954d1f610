"""`llmserve run` understands the command line of TensorRT-LLM's examples/run.py: names with underscores, several values
behind one flag.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from llmserve.cli.help import GroupedHelpCommand
from llmserve.errors import InvalidArgument, raise_problems

SEVERAL_VALUES = ("--input_text", "--stop_words", "--bad_words")
ONE_SET = ("--stop_words", "--bad_words")  # there, a second one is for the second prompt


class RunCommand(GroupedHelpCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread(args))


def spread(arguments: Sequence[str]) -> list[str]:
    """`--input_text a b` -> `--input_text a --input_text b`; with dashes a flag has one value, as everywhere here."""
    repeated = [flag for flag, count in Counter(arguments).items() if flag in ONE_SET and count > 1]
    raise_problems(
        InvalidArgument,
        "words are for every prompt here",
        [f"{flag} may be given once, with all its words behind it" for flag in repeated],
    )
    found: list[str] = []
    flag, num_values = "", 0
    for argument in arguments:
        if argument.startswith("--"):
            flag, num_values = argument, 0
        else:
            num_values += 1
            if flag in SEVERAL_VALUES and num_values > 1:
                found.append(flag)
        found.append(argument)
    return found
