"""Shares one `llmserve serve` among all cases of a suite with the same flags: a case's own server forwards to it.

A suite starts a server for each of its cases. Starting one takes seconds of CPU time, and most have equal flags.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tools.peer_suites.sdist import FOLDER

HOST = "127.0.0.1"
START_S = 60
PIECE = 1 << 16
SERVERS = FOLDER / "servers"


def port_of(engine: str, flags: Sequence[str], environment: Mapping[str, str]) -> int:
    """Returns the port of the server with these flags, and starts it if necessary."""
    SERVERS.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(json.dumps([engine, list(flags), dict(environment)]).encode()).hexdigest()[:16]
    known = SERVERS / f"{name}.json"
    if known.exists():
        return int(json.loads(known.read_text())["port"])
    with socket.create_server((HOST, 0)) as free:
        port: int = free.getsockname()[1]
    own = ["--host", HOST, "--http-port", str(port), "--grpc-port", "0", "--metrics-port", "0"]
    with (SERVERS / f"{name}.txt").open("wb") as log:
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("llmserve")), "serve", engine, *own, *flags],
            stdout=log, stderr=log, env={**os.environ, **environment}, start_new_session=True,
        )  # fmt: skip
    known.write_text(json.dumps({"port": port, "pid": process.pid}))
    ends = time.monotonic() + START_S
    while not _is_up(port):
        if process.poll() is not None or time.monotonic() > ends:
            known.unlink()
            raise SystemExit((SERVERS / f"{name}.txt").read_text())
        time.sleep(0.05)
    return port


def _is_up(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=START_S).close()
    except urllib.error.HTTPError as error:
        return error.code == 401  # it requires a key
    except OSError:
        return False
    return True


def end_all() -> None:
    """Ends the servers of a run."""
    for known in SERVERS.glob("*.json"):
        with suppress(ProcessLookupError):
            os.kill(json.loads(known.read_text())["pid"], signal.SIGKILL)
        known.unlink()


async def forward(host: str, port: int, target: int) -> None:
    """Forwards connections to `host` and `port` to `target`, until this process ends."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(HOST, target)
        await asyncio.gather(_copied(reader, there_writer), _copied(there_reader, writer))

    async with await asyncio.start_server(connected, host, port) as server:
        await server.serve_forever()


async def _copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(PIECE):
            writer.write(piece)
            await writer.drain()
    with suppress(OSError):
        writer.close()
