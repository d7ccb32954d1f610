"""Pages of other origins: what browsers are told, and that they are told nothing by default."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from llmserve.errors import InvalidArgument
from llmserve.frontends.shared.cross_origin import parse_origins
from tests.frontends.http.test_inference_api import ADD_TWO, Http, fp32
from tests.frontends.server import running_server
from tests.frontends.stub_core import StubCore

OURS, THEIRS = "https://chat.example.org", "https://evil.example.org"
BODY = {"inputs": [fp32("INPUT0", [1.0]), fp32("INPUT1", [2.0])]}
ASKING = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
GRANTS = ("access-control-allow-origin", "access-control-allow-methods", "access-control-allow-headers")


def server_for(*origins: str) -> Iterator[Http]:
    with running_server(StubCore, cross_origin=parse_origins(origins, "--flag")) as running:
        call = Http(running.http_port)
        yield call
        call.connection.close()


@pytest.fixture(scope="module")
def some() -> Iterator[Http]:
    yield from server_for(OURS, "http://localhost:3000", "http://[::1]:3000")


@pytest.fixture(scope="module")
def every() -> Iterator[Http]:
    yield from server_for("*")


@pytest.fixture(scope="module")
def none() -> Iterator[Http]:
    yield from server_for()


def granted(call: Http) -> list[str | None]:
    assert "access-control-allow-credentials" not in call.response.headers
    return [call.response.headers.get(name) for name in GRANTS]


def test_by_default_nothing_is_said(none: Http) -> None:
    assert none("POST", ADD_TWO, BODY, {"origin": OURS})[0] == 200
    assert granted(none) == [None, None, None]
    assert "vary" not in none.response.headers
    assert none("OPTIONS", ADD_TWO, None, {"origin": OURS, **ASKING})[0] == 405
    assert granted(none) == [None, None, None]


@pytest.mark.parametrize("path", [ADD_TWO, "/v1/chat/completions", "/v1/models"])
def test_a_browser_asks_first(some: Http, path: str) -> None:
    assert some("OPTIONS", path, None, {"origin": OURS, **ASKING}) == (200, b"")
    assert granted(some) == [OURS, "GET, POST, DELETE, OPTIONS", "authorization,content-type"]
    assert some.response.headers["access-control-max-age"] == "600"
    assert some.response.headers["vary"] == "Origin"
    assert some("OPTIONS", path, None, {"origin": THEIRS, **ASKING})[0] == 200
    assert granted(some) == [None, None, None]


@pytest.mark.parametrize("origin", [OURS, "http://localhost:3000", "http://[::1]:3000"])
def test_answers_may_be_read(some: Http, origin: str) -> None:
    assert some("POST", ADD_TWO, BODY, {"origin": origin})[0] == 200
    assert granted(some) == [origin, None, None]
    assert "x-request-id" in some.response.headers["access-control-expose-headers"]
    assert some("GET", "/v1/nothing", None, {"origin": origin})[0] == 404
    assert granted(some)[0] == origin


@pytest.mark.parametrize(
    "origin", [THEIRS, "null", "https://chat.example.org:8443", "https://chat.example.org.evil.org"]
)
def test_others_read_nothing(some: Http, origin: str) -> None:
    some("POST", ADD_TWO, BODY, {"origin": origin})
    assert granted(some) == [None, None, None]
    assert some.response.headers["vary"] == "Origin"  # a cache must not show this to those who may


def test_every_page(every: Http) -> None:
    every("POST", ADD_TWO, BODY, {"origin": THEIRS})
    assert granted(every) == ["*", None, None]
    assert "vary" not in every.response.headers
    every("POST", ADD_TWO, BODY)
    assert granted(every) == [None, None, None]


def test_credentials_of_every_page_where_the_operator_says_so() -> None:
    made = replace(parse_origins("*", "--flag"), with_credentials=True)
    with running_server(StubCore, cross_origin=made) as running:
        call = Http(running.http_port)
        for method, body in (("OPTIONS", None), ("POST", BODY)):
            assert call(method, ADD_TWO, body, {"origin": THEIRS, **(ASKING if body is None else {})})[0] == 200
            headers = call.response.headers
            assert headers["access-control-allow-origin"] == THEIRS  # browsers take no * with credentials
            assert headers["access-control-allow-credentials"] == "true"
            assert headers["vary"] == "Origin"
        call.connection.close()


@pytest.mark.parametrize(
    "path",
    ["/v2/repository/models/add_two/unload", "/v2/logging", "/v2/trace/setting", "/v2/models/add_two/trace/setting"],
)
def test_what_is_not_for_pages_stays_so(every: Http, path: str) -> None:
    """Not for one whose host name has been pointed at this server either: its browser sends an origin, too."""
    for origin in (THEIRS, "http://rebound.example.org:8000"):
        assert every("POST", path, {}, {"origin": origin, "host": "rebound.example.org:8000"})[0] == 403


def test_pages_of_this_machine() -> None:
    for call in server_for("localhost"):
        for origin in ("http://localhost", "http://localhost:3000", "https://127.0.0.1:8080", "http://[::1]:3000"):
            assert call("OPTIONS", ADD_TWO, None, {"origin": origin, **ASKING})[0] == 200
            assert granted(call)[0] == origin
        for origin in ("http://localhost.evil.com", "http://notlocalhost", "http://evil.com", "null", "localhost"):
            call("POST", ADD_TWO, BODY, {"origin": origin})
            assert granted(call)[0] is None
            assert call.response.headers["vary"] == "Origin"


def test_origins_that_are_none() -> None:
    wrong = ("example.org", "https://", "https://a.org/", "https://a.org/x", "HTTPS://a.org", "https://A.org", "ftp://a.org",
             "https://a.org:443", "http://a.org:80", "https://u@a.org", "https://a.org:x", "null", "")  # fmt: skip
    with pytest.raises(InvalidArgument) as caught:
        parse_origins((*wrong, "*"), "--flag")
    assert str(caught.value).count("expected SCHEME://HOST") == len(wrong)
    assert "* allows every page; leave the others out" in str(caught.value)
    assert parse_origins(("https://a.org", "https://a.org"), "--flag").origins == {"https://a.org"}
