"""The loop of questions and answers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from llmserve.cli.chat.commands import Quit, candidates, is_command, obey, quietly
from llmserve.cli.chat.conversation import load_conversation
from llmserve.cli.chat.keyboard import Keyboard
from llmserve.cli.chat.markdown import answer_display
from llmserve.cli.chat.parameters import LOG_PROBS
from llmserve.cli.chat.session import Session
from llmserve.errors import LlmserveError, Unavailable

HELP = "Ctrl-C stops an answer; Ctrl-D, or Ctrl-C at the prompt, ends the chat; /help lists all commands."
MAX_ATTEMPTS = 3  # for one question, if the server is lost
Result = TypeVar("Result")


@dataclass(slots=True)
class Talk:
    session: Session
    runner: asyncio.Runner
    history: Path | None
    wants_markdown: bool = True
    shows_statistics: bool = False
    is_terminal: bool = field(default_factory=sys.stdin.isatty)  # where the questions come from

    def begin(self, conversation: Path | None, parameters: Mapping[str, str], system: str) -> None:
        """Apply the command line's options. `parameters`: as in `/params`."""
        self.say(self.session.prompts.note)
        if conversation is not None:
            self.load(conversation)
        for name, text in parameters.items():
            self.run(self.session.set(name, text))
        self.session.conversation.system = system or self.session.conversation.system

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work`. Ctrl-C cancels it and raises `KeyboardInterrupt`."""
        try:
            return self.runner.run(work)
        except asyncio.CancelledError:  # a runner that is interrupted before its first step forgets what cancelled it
            raise KeyboardInterrupt from None

    def loop(self) -> None:
        """Read and answer questions until there are no more."""
        keyboard = Keyboard(lambda line, word: candidates(self, line, word), self.history, self.is_terminal)
        if self.is_terminal:
            print(HELP)
        try:
            while True:
                if text := keyboard.read().strip():
                    self._take(text)
        except (EOFError, KeyboardInterrupt, Quit) as reason:
            if self.is_terminal and not isinstance(reason, Quit):
                print()
        finally:
            keyboard.close()

    def answer(self, question: str) -> None:
        """Answer a question. On a terminal, it waits for a server that is gone; otherwise it raises `Unavailable`."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                self.ask(question)
            except KeyboardInterrupt:
                return
            except Unavailable as error:
                if not self.is_terminal:
                    raise
                if attempt == MAX_ATTEMPTS or not self._is_back(error):
                    self.complain(error)
                    return
            except LlmserveError as error:
                self.complain(error)
                return
            else:
                return

    def ask(self, question: str) -> None:
        """Ask once. Raises `LlmserveError`, and `KeyboardInterrupt` if the answer was stopped."""
        display = answer_display(wants_markdown=self.wants_markdown)
        try:
            warning = self.run(self.session.ask(question, display.show))
        except KeyboardInterrupt:
            display.end(" [cancelled]")
            raise
        except LlmserveError:
            display.end()
            raise
        display.end()
        self.say(warning)
        latest = self.session.latest
        assert latest is not None
        if self.shows_statistics:
            self._tell(f"[{latest.speed()}]")
        if self.session.parameters.get(LOG_PROBS) and (sureness := latest.sureness()):
            self._tell(f"[{sureness}]")

    def load(self, path: Path) -> None:
        """Load a conversation. On `InvalidArgument`, nothing changes."""
        conversation, parameters = load_conversation(path)
        known = self.run(self.session.names())
        dropped = [name for name in parameters if name not in known]
        self.session.conversation = conversation
        self.session.parameters = {name: value for name, value in parameters.items() if name in known}
        if dropped:
            self.say(f"this model does not support {', '.join(dropped)}, which is dropped")

    def names(self) -> list[str]:
        """Names of parameters."""
        return quietly(lambda: self.run(self.session.names()))

    def models(self) -> list[str]:
        """Names of models; empty if only an administrator may list them."""
        return quietly(lambda: self.run(self.session.client.model_names()))

    def say(self, note: str) -> None:
        if note:
            self._tell(f"note: {note}")

    def complain(self, error: LlmserveError) -> None:
        self._tell(f"error: {error}")

    def _tell(self, text: str) -> None:
        sys.stdout.flush()
        print(text, file=sys.stderr)

    def _take(self, text: str) -> None:
        if not is_command(text):
            self.answer(text.removeprefix("/") if text.startswith("//") else text)
            return
        try:
            obey(self, text)
        except LlmserveError as error:
            self.complain(error)

    def _is_back(self, error: Unavailable) -> bool:
        """Wait for the server. Returns False if the user stops waiting."""
        self.say(f"{error}")
        try:  # Ctrl-C may already come during the message
            self.say("waiting for it; the conversation is kept, and the question is asked again. Ctrl-C stops waiting")
            self.run(self.session.wait_for_server())
        except KeyboardInterrupt:
            print()
            self.say("/retry asks again")
            return False
        self.say("the server is back")
        return True
