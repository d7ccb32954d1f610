"""Listening sockets."""

from __future__ import annotations

import socket

import pytest

from llmserve.errors import Unavailable
from llmserve.wire.listener import claim_port


def test_answers_do_not_wait_for_acknowledgements() -> None:
    """asyncio switches Nagle's algorithm off only on sockets that name TCP as their protocol."""
    with claim_port("127.0.0.1", 0, "--flag") as listener:
        assert listener.proto == socket.IPPROTO_TCP
        with socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
            assert accepted.proto == socket.IPPROTO_TCP
            accepted.close()


def test_a_port_in_use_names_its_flag() -> None:
    with claim_port("localhost", 0, "--flag") as listener:
        port = listener.getsockname()[1]
        with pytest.raises(Unavailable, match=rf"localhost:{port} \(--flag\): the port is already in use"):
            claim_port("localhost", port, "--flag")


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
def test_an_unusable_host(host: str) -> None:
    advice = "give an address of this machine with --http-address or --host"
    with pytest.raises(Unavailable, match=rf"cannot listen on {host}:1234 \(--http-port\): .*; {advice}"):
        claim_port(host, 1234, "--http-port")


def has_ipv6() -> bool:
    try:
        socket.create_server(("::", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_every_address_of_both_families() -> None:
    with claim_port("::", 0, "--flag") as listener, socket.create_connection(("127.0.0.1", listener.getsockname()[1])):
        pass
