"""In the server: one process of a model from start to end, and its work."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass

from llmserve.backends.python.instance import Done
from llmserve.backends.python.line import ServerLine
from llmserve.backends.python.process import messages as m
from llmserve.backends.python.process.launch import ModelProcess
from llmserve.serving.types import InferResponse


@dataclass(slots=True, eq=False)
class Batch:
    """Requests to be executed together, and the lines for their responses."""

    lines: dict[int, ServerLine]
    message: m.Execute
    on_done: Done


class Life:
    """A separate thread sends messages, because a process that does not read must not block the loop."""

    def __init__(self, process: ModelProcess, instance_name: str) -> None:
        self.has_answered = False  # whether the model was opened
        self._process = process
        self._outgoing: queue.SimpleQueue[object | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name=f"to-{instance_name}", daemon=True)
        self._lock = threading.Lock()
        self._batches: dict[int, Batch] = {}  # batches that are not done
        self._lines: dict[int, ServerLine] = {}  # requests without a final response
        self._killed_because = ""

    def start(self, first: object) -> None:
        self.send(first)
        self._sender.start()

    def send(self, message: object) -> None:
        self._outgoing.put(message)

    def receive(self) -> object:
        """The next message of the process; EOFError at its end."""
        return self._process.channel.receive()

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> str:
        """How it ended, as text."""
        how = self._process.wait()
        self._outgoing.put(None)
        return self._killed_because or how

    # its work

    def execute(self, batch: Batch) -> None:
        with self._lock:
            self._batches[batch.message.batch] = batch
            self._lines.update(batch.lines)
        self.send(batch.message)

    def respond(self, number: int, response: InferResponse) -> None:
        with self._lock:
            line = self._lines.pop(number, None) if response.final else self._lines.get(number)
        if line is not None:  # otherwise another thread of the model ended it
            line.post(response)

    def finish(self, number: int) -> None:
        with self._lock:
            batch = self._batches.pop(number)
        batch.on_done(None)

    def tell_cancelled(self, number: int) -> None:
        with self._lock:
            if number in self._lines:
                self.send(m.Cancelled(number))

    def kill_with(self, batch: Batch, why: str) -> bool:
        """End the process if it has this batch."""
        with self._lock:
            if batch.message.batch not in self._batches:
                return False
            self._killed_because = why
        self.kill()
        return True

    def left(self) -> tuple[list[ServerLine], list[Done]]:
        """The rest when it ended: responses, and ends of batches."""
        with self._lock:
            return list(self._lines.values()), [batch.on_done for batch in self._batches.values()]

    def _send_all(self) -> None:
        while (message := self._outgoing.get()) is not None:
            try:
                self._process.channel.send(message)
            except Exception:  # border: mostly it has gone, which who receives notices; else its requests would hang
                self.kill()
                return
            del message
