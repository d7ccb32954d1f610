"""`--cluster`: which workers a server asks."""

from __future__ import annotations

import pytest

from llmserve.cluster.address import ClusterAddress, parse_address
from llmserve.errors import InvalidArgument


def test_a_place_and_what_differs_from_the_defaults() -> None:
    assert parse_address("dynamo.demo") == ClusterAddress("dynamo", "demo", "file", "tcp", "zmq")
    found = parse_address("a.b,discovery=etcd,request_plane=nats,event_plane=nats")
    assert found == ClusterAddress("a", "b", "etcd", "nats", "nats")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("demo", "demo is not NAMESPACE.NAME"),
        ("a.b.c", "a.b.c is not NAMESPACE.NAME"),
        ("", "nothing is not NAMESPACE.NAME"),
        ("a.b,discovery=mongo", "discovery=mongo is not known; use file, mem, etcd, kubernetes"),
        ("a,plane=tcp", "a is not NAMESPACE.NAME.*plane=tcp is not known; use discovery=..., request_plane=..."),
    ],
)
def test_everything_that_is_wrong_is_said(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=f"(?s){words}"):
        parse_address(text)
