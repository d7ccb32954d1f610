"""The page's files as a browser gets them. What the page does: tests/page."""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest

from llmserve.frontends.page.web_page import FOLDER, read_files
from llmserve.frontends.shared.api_keys import ApiKeys, owner_of_key
from tests.frontends.server import HOST, RunningServer, running_server
from tests.frontends.stub_core import StubCore

KEY = "a-key-of-sixteen-characters"
NAMES = sorted(path.name for path in FOLDER.iterdir())
SOURCES = {name: (FOLDER / name).read_text() for name in NAMES}
SERVED = {name: file.content.decode() for name, file in read_files().items()}
OUTSIDE = re.compile(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", re.IGNORECASE)
NAMESPACES = re.compile(r"http://www\.w3\.org/(?:2000/svg|1998/Math/MathML)")  # are never fetched
INJECTING = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser|srcdoc")


@pytest.fixture(scope="module")
def locked() -> Iterator[RunningServer]:
    owner = owner_of_key("somebody", KEY, is_admin=False, source="test")
    with running_server(StubCore, api_keys=ApiKeys(None, [owner])) as running:
        yield running


def get(server: RunningServer, path: str, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection(HOST, server.http_port, timeout=20)
    try:
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_served_to_everybody(locked: RunningServer, name: str) -> None:
    answer, body = get(locked, f"/page/{name}")
    assert (answer.status, body) == (200, SERVED[name].encode())
    types = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert (answer.headers["Content-Type"] or "").startswith(types[name.rpartition(".")[2]])
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'self'; ")
    assert "unsafe" not in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    tag = answer.headers["ETag"]
    for condition in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        unchanged, nothing = get(locked, f"/page/{name}", If_None_Match=condition)
        assert (unchanged.status, nothing, unchanged.headers["ETag"]) == (304, b"", tag)
        assert unchanged.headers["Content-Length"] is None
    assert get(locked, f"/page/{name}", If_None_Match='"other"')[0].status == 200


def test_the_root_is_the_page(locked: RunningServer) -> None:
    assert get(locked, "/")[1] == SERVED["index.html"].encode()
    assert get(locked, "/?x=y")[0].status == 200


def test_the_page_is_below_a_root_path() -> None:
    """`/llm` leads to `/llm/`: the page names its files relative to its own path."""
    with running_server(StubCore, root_path="/llm") as running:
        answer, _ = get(running, "/llm")
        assert (answer.status, answer.headers["Location"]) == (307, "/llm/")
        assert get(running, "/llm/")[1] == SERVED["index.html"].encode()
        assert get(running, "/llm/page/icon.svg")[0].status == 200


@pytest.mark.parametrize(
    "path", ["/page/", "/page/none.js", "/page/..%2fweb_page.py", "/page/../web_page.py", "/page/%00"]
)
def test_there_is_nothing_else(locked: RunningServer, path: str) -> None:
    assert get(locked, path)[0].status == 404


def test_what_the_page_asks_for_takes_a_key(locked: RunningServer) -> None:
    for path in ("/metrics", "/v1/models"):
        assert get(locked, path)[0].status == 401
        assert get(locked, path, Authorization=f"Bearer {KEY}")[0].status == 200


def test_metrics_are_those_of_the_metrics_port(server: RunningServer) -> None:
    answer, body = get(server, "/metrics")
    assert body.decode() == server.core.metrics_text()
    assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"


def test_a_server_without_the_page_has_neither() -> None:
    with running_server(StubCore, mounts=()) as bare:
        assert [get(bare, path)[0].status for path in ("/", "/page/main.js")] == [404, 404]


def test_files_are_small_and_of_known_types() -> None:
    assert SERVED.keys() == set(NAMES)
    assert sum(len(text.encode()) for text in SERVED.values()) < 120_000


@pytest.mark.parametrize("name", NAMES)
def test_a_browser_gets_neither_comments_nor_indentation(name: str) -> None:
    lines = SERVED[name].splitlines()
    assert [line for line in lines if not line or line != line.strip() or line.startswith(("//", "/*"))] == []
    if name.endswith(".css"):
        assert "".join(SERVED[name].split()) == "".join(
            re.sub(r"/\*.*?\*/", "", SOURCES[name], flags=re.DOTALL).split()
        )
        return
    kept = {line.strip() for line in SOURCES[name].splitlines()}
    cut = [line for line in lines if line not in kept]  # and nothing else
    assert all(any(each.startswith(f"{line} // ") or f"{line}  // " in each for each in kept) for line in cut), cut


@pytest.mark.parametrize("name", NAMES)
def test_no_file_names_another_host_or_makes_markup_of_text(name: str) -> None:
    assert OUTSIDE.findall(NAMESPACES.sub("", SOURCES[name])) == []
    assert INJECTING.findall(SOURCES[name]) == []


class Markup(HTMLParser):
    """What the page has."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.texts: set[str] = set()
        self.links: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids += [values["id"]] if "id" in values else []
        self.texts |= {
            values[name] for name in ("data-text", "data-title", "data-label", "data-placeholder") if name in values
        }
        self.links += [values[name] for name in ("src", "href") if name in values]
        self.inline += [name for name in values if name.startswith("on") or name == "style"]
        self.inline += [tag] if tag == "style" or (tag == "script" and "src" not in values) else []


@pytest.fixture(scope="module")
def markup() -> Markup:
    parser = Markup()
    parser.feed(SOURCES["index.html"])
    return parser


def strings(language: str) -> dict[str, set[str]]:
    """The values that stand in each text."""
    table = re.search(rf"^const {language} = \{{\n(.*?)^\}};", SOURCES["strings.js"], re.MULTILINE | re.DOTALL)
    assert table is not None
    lines = dict(re.findall(r'^  (\w+): "(.*)",$', table[1], re.MULTILINE))
    assert len(lines) == len(table[1].splitlines())
    return {name: set(re.findall(r"\{(\w+)\}", text)) for name, text in lines.items()}


def test_both_languages_say_the_same_with_the_same_values(markup: Markup) -> None:
    english = strings("en")
    assert strings("zh") == english
    scripts = "".join(text for name, text in SOURCES.items() if name.endswith(".js") and name != "strings.js")
    used = markup.texts | set(re.findall(r'"(\w+)"', scripts))
    assert set(english) - used == set()
    assert markup.texts <= english.keys()
    assert set(re.findall(r'\bsay\("(\w+)"', scripts)) <= english.keys()


def test_the_markup_fits_the_scripts(markup: Markup) -> None:
    assert markup.inline == []
    assert len(markup.ids) == len(set(markup.ids))
    scripts = "".join(text for name, text in SOURCES.items() if name.endswith(".js"))
    assert set(re.findall(r'byId\("([\w-]+)"\)', scripts)) <= set(markup.ids)
    symbols = {f"#{name}" for name in markup.ids if name.startswith("i-")}
    assert {link for link in markup.links if link.startswith("#i-")} <= symbols
    files = {link for link in markup.links if not link.startswith("#")}
    assert files <= {f"page/{name}" for name in NAMES}
    imported = {name for source in SOURCES.values() for name in re.findall(r'from "\./([\w.]+)"', source)}
    assert imported <= set(NAMES)
    reached = imported | {link.removeprefix("page/") for link in files} | {"index.html"}
    assert reached == set(NAMES)
