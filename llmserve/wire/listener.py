"""Listening sockets, and the end of their connections."""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from llmserve.errors import Unavailable

BACKLOG = 2048
CLOSE_TIMEOUT_S = 2  # for connections that are still writing when the server stops


class OpenConnection(Protocol):
    closed: asyncio.Event

    def leave(self) -> None:
        """Accept no new requests."""
        ...

    def abort(self) -> None:
        """End running requests and close."""
        ...


ConnectionT = TypeVar("ConnectionT", bound=OpenConnection)


@dataclass(frozen=True, slots=True)
class ListeningServer(Generic[ConnectionT]):
    port: int
    _server: asyncio.Server
    _connections: set[ConnectionT]  # the open ones

    async def stop(self) -> None:
        """Close the port, wait up to `CLOSE_TIMEOUT_S` for running requests, then end them."""
        self._server.close()
        for connection in list(self._connections):
            connection.leave()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await asyncio.gather(*(connection.closed.wait() for connection in self._connections))
        for connection in list(self._connections):
            connection.abort()


def url_host(host: str) -> str:
    """`host` as written before `:port` in a URL."""
    return f"[{host}]" if ":" in host else host


def claim_port(host: str, port: int, flag: str, *, shared: bool = False) -> socket.socket:
    """A listening socket. Raises `Unavailable`, naming the port and its flag, if it cannot be opened.

    `shared`: other processes of this user may listen on the port, too; the kernel gives each connection to one of them.
    """
    listener = hold_port(host, port, flag, shared=shared)
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _unavailable(host, port, flag, error) from error
    return listener


def hold_port(host: str, port: int, flag: str, *, shared: bool = False) -> socket.socket:
    """Like `claim_port`, but without listening, so it gets no connections."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        # with an explicit protocol, else asyncio leaves Nagle's algorithm on and every answer may wait 40 ms
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _unavailable(host, port, flag, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        _notice_dead_peers(listener)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _unavailable(host, port, flag, error) from error
    return listener


def _unavailable(host: str, port: int, flag: str, error: OSError) -> Unavailable:
    in_use = error.errno == errno.EADDRINUSE
    reason = "the port is already in use" if in_use else error.strerror or str(error)
    advice = f"choose another port with {flag}"
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        advice = f"give an address of this machine with {flag.removesuffix('port')}address or --host"
    return Unavailable(f"cannot listen on {url_host(host)}:{port} ({flag}): {reason}; {advice}")


def _notice_dead_peers(listener: socket.socket) -> None:
    """Close connections whose peer has vanished silently after about two minutes, not hours."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # accepted sockets inherit it
    if hasattr(socket, "TCP_KEEPIDLE"):
        for option, value in ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4)):
            listener.setsockopt(socket.IPPROTO_TCP, option, value)
