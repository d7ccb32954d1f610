"""Renders a checkpoint's jinja chat template in a separate process with limits on time and memory.

A checkpoint is untrusted data, and its template is a program: two nested loops, or a width in a format, can take hours
or gigabytes. The process (`template_process.py`) is started with the template, and restarted after it was killed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from llmserve.errors import CheckpointError, InvalidArgument, Unavailable
from llmserve.stages.template_process import MAX_WORK_S

NO_VALUES: Mapping[str, Any] = MappingProxyType({})
PROCESS = "llmserve.stages.template_process"
MAX_SOURCE_BYTES = 1 << 20
TEMPLATE = "chat_template"  # of a request, among the variables for its template
ENDINGS = ("add_generation_prompt", "continue_final_message")
JOINED_ARGUMENTS = re.compile(r"""function(?:['"]\])?(?:\.|\[['"])arguments(?:['"]\])?\s*[+~]""")
CUT = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers' mark: what a template writes from here on is not part of the prompt


@dataclass(frozen=True, slots=True)
class Ending:
    """How a prompt ends: with the opening of an answer, or with the beginning of the answer itself."""

    opens: bool
    continues: bool

    @classmethod
    def of(cls, roles: Sequence[str], values: Mapping[str, Any]) -> Ending:
        """`values` may set it, under transformers' names. By default, an assistant's last message is continued."""
        opens, continues = (values.get(name) for name in ENDINGS)
        if opens and continues:
            raise InvalidArgument(f"{' and '.join(ENDINGS)} exclude each other: an answer either begins or continues")
        ends_inside = roles[-1] == "assistant"
        if continues and not ends_inside:
            raise InvalidArgument(f"{ENDINGS[1]} requires that the last message is the assistant's")
        if continues is None:
            continues = ends_inside and opens is None
        return cls(opens=not ends_inside if opens is None else bool(opens), continues=bool(continues))


class ChatTemplate:
    """Threads take turns, and wait while the template runs, so do not call it on the event loop."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], place: str = "") -> None:
        """Raises `CheckpointError`, which names `place`, if the template cannot be compiled within the limits."""
        self._name = f"the chat template{place and f' in {place}'}"
        if (size := len(source.encode(errors="replace"))) > MAX_SOURCE_BYTES:
            raise CheckpointError(f"{self._name} has {size} bytes, more than {MAX_SOURCE_BYTES}")
        self._source = source
        self._special_tokens = dict(special_tokens)
        self.joins_arguments = JOINED_ARGUMENTS.search(source) is not None  # of calls, to text, so they must be text
        self._turn = threading.Lock()
        self._process = TemplateProcess()
        self.names = self._compile()  # variables that it reads

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        more: Mapping[str, Any] = NO_VALUES,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The prompt's text, which ends as `Ending` specifies.

        `more`: additional variables for the template; they cannot replace the standard ones. `tools`: in the format of
        OpenAI's API.
        """
        ending = Ending.of([message["role"] for message in messages], more)
        more = {name: value for name, value in more.items() if name not in ENDINGS}
        last = messages[-1]
        continues = ending.continues and not last.get("tool_calls")
        values: dict[str, Any] = {
            **self._special_tokens,
            "messages": [*messages[:-1], {**last, "content": last["content"] + CUT}] if continues else messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": ending.opens,
        }
        if taken := sorted(values.keys() & more.keys()):
            raise InvalidArgument(f"chat_template_kwargs must not have {', '.join(taken)}: the server sets them")
        with self._turn:
            if self._process.has_ended():
                self._process = TemplateProcess()
                self._compile()
            answer = self._process.ask(values | dict(more))
        if "problem" in answer:
            raise InvalidArgument(f"the chat template refuses these messages: {answer['problem']}")
        text: str = answer["text"]
        return _up_to_end(text) if continues else text

    def _compile(self) -> frozenset[str]:
        answer = self._process.ask(self._source)
        if "problem" in answer:
            raise CheckpointError(f"{self._name} cannot be compiled: {answer['problem']}")
        return frozenset(answer["names"])


class TemplateProcess:
    """Answers a line of JSON with another one. It ends with this object, or if a request exceeds the limits."""

    def __init__(self) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", PROCESS],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                start_new_session=True,  # Ctrl-C in a terminal must not end it
            )
        except OSError as error:
            raise Unavailable(f"no process can be started for the chat template: {error}") from error
        self._end = weakref.finalize(self, _end, self._process)

    def ask(self, question: Any) -> Mapping[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = json.dumps(question).encode()
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if answer.endswith(b"\n"):
            found: Mapping[str, Any] = json.loads(answer)
            return found
        code = self._process.wait()
        self._end()
        return {"problem": _how_it_ended(code)}

    def has_ended(self) -> bool:
        return self._process.poll() is not None


def _up_to_end(text: str) -> str:
    """Without text after the last message. A template that trims messages does not have the mark in its text."""
    shown, end, rest = text.rpartition(CUT.rstrip())
    if not end:
        raise InvalidArgument("the chat template leaves out the last message, so an answer cannot continue it")
    return shown if rest.startswith(" ") else shown.rstrip()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _how_it_ended(code: int) -> str:
    if code == -signal.SIGPROF:
        return f"it needs more than {MAX_WORK_S:g} s of processor time"
    return f"its process ended with code {code}"
