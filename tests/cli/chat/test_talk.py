from __future__ import annotations

import asyncio
import signal
from typing import Any, cast

import pytest

from llmserve.cli.chat.session import Session
from llmserve.cli.chat.talk import Talk


class InterruptedAtItsBeginning(asyncio.Runner):  # type: ignore[misc]  # final, says typeshed
    """SIGINT arrives when `run` has set its handler, but not yet begun to count signals."""

    def __setattr__(self, name: str, value: Any) -> None:
        is_handled = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        if name == "_interrupt_count" and value == 0 and is_handled:
            signal.raise_signal(signal.SIGINT)
        super().__setattr__(name, value)


def test_an_interruption_of_what_has_not_begun() -> None:
    with InterruptedAtItsBeginning() as runner:
        talk = Talk(cast(Session, None), runner, None)
        with pytest.raises(KeyboardInterrupt):
            talk.run(asyncio.sleep(60))
        with pytest.raises(KeyboardInterrupt):  # and the next
            talk.run(asyncio.sleep(60))
