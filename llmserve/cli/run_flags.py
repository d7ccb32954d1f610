"""`llmserve run` accepts the command line of TensorRT-LLM's examples/run.py: names with underscores, and several values
after one flag.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from llmserve.cli.help import GroupedHelpCommand
from llmserve.cli.old_flags import Translation
from llmserve.cli.trtllm_flags import RUN
from llmserve.errors import InvalidArgument, raise_problems

SEVERAL_VALUES = ("--input_text", "--stop_words", "--bad_words")
PROMPTS = {"--input-text", "--input-file", "--benchmark"}
PROMPT = "The highest mountain in the world is"
ONE_SET = ("--stop_words", "--bad_words")  # in run.py, a second one is for the second prompt


class RunCommand(GroupedHelpCommand):
    old_flags = RUN

    def translated(self, args: Sequence[str]) -> Translation:
        done = super().translated(spread(args))
        flags = {word.partition("=")[0].replace("_", "-") for word in args}
        if "--engine-dir" in flags and not flags & PROMPTS:  # run.py has a default prompt
            done.arguments.append(f"--input-text={PROMPT}")
        return done


def spread(arguments: Sequence[str]) -> list[str]:
    """`--input_text a b` -> `--input_text a --input_text b`; a flag with dashes has one value, as elsewhere."""
    repeated = [flag for flag, count in Counter(arguments).items() if flag in ONE_SET and count > 1]
    raise_problems(
        InvalidArgument,
        "words are for every prompt here",
        [f"{flag} may be given once, followed by all its words" for flag in repeated],
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
