"""Serves the files of the web page. They are public and the same for everybody; the page's own calls need an API key.

`/` is the page, `/page/FILE` are its files. They are read at the first request.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmserve.frontends.http.error_answers import TEXT, refused
from llmserve.frontends.http.mounts import Mount
from llmserve.frontends.shared.extension_state import Extensions
from llmserve.frontends.shared.server_core import Core
from llmserve.wire.http1.answers import WholeAnswer
from llmserve.wire.http1.request import Request

FOLDER = Path(__file__).with_name("assets")
INDEX = "index.html"
PATHS = (("GET", "/"), ("GET", "/page/{file}"))
NOT_MODIFIED = 304
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
COMMENT = re.compile(r"(?:^|\s)\s*// .*$|^/\*(?s:.*?)\*/$|^\s*/\*\*(?s:.*?)\*/$", re.MULTILINE)
AROUND_MARKS = re.compile(r"\s*([{};,])\s*")  # in style sheets, where white space next to these marks has no meaning
POLICY = "; ".join((
    "default-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'", "object-src 'none'",
    "require-trusted-types-for 'script'", "trusted-types 'none'",  # text never becomes markup, whatever its source
))  # fmt: skip
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # cached, but revalidated by its ETag
}


@dataclass(frozen=True, slots=True)
class PageFile:
    content: bytes
    content_type: str
    tag: str  # ETag of the content, with its quotes


def web_page(core: Core, extensions: Extensions, max_input_bytes: int) -> Mount:
    root = extensions.root_path
    return Mount((*PATHS, ("GET", root)) if root else PATHS, WebPage(root).answer, is_public=True)


class WebPage:
    """The web page of one server."""

    def __init__(self, root_path: str) -> None:
        self._root_path = root_path
        self._files: Mapping[str, PageFile] | None = None  # None before the first request

    async def answer(self, request: Request) -> WholeAnswer:
        if request.path == self._root_path:  # the page's links are relative to `root_path/`
            return WholeAnswer(status=307, headers={"Location": f"{self._root_path}/"})
        if self._files is None:
            self._files = await asyncio.to_thread(read_files)
        file = self._files.get(request.path_params.get("file", INDEX))
        if file is None:
            return refused("Not Found", 404, TEXT)
        headers = {**HEADERS, "ETag": file.tag}
        if has_tag(request.header(b"if-none-match") or "", file.tag):
            return WholeAnswer(status=NOT_MODIFIED, headers=headers)
        return WholeAnswer(file.content, content_type=file.content_type, headers=headers)


def read_files() -> dict[str, PageFile]:
    """The files by name."""
    contents = {
        path: lean(path.read_text("utf-8"), path.suffix) for path in FOLDER.iterdir() if path.suffix in CONTENT_TYPES
    }
    return {
        path.name: PageFile(content, CONTENT_TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:16]}"')
        for path, content in contents.items()
    }


def lean(source: str, suffix: str) -> bytes:
    """Removes indentation and comments, an eighth of it. No string in these files has ` // ` or several lines."""
    lines = (line.strip() for line in COMMENT.sub("", source).splitlines())
    text = "\n".join(filter(None, lines))
    return (AROUND_MARKS.sub(r"\1", text) if suffix == ".css" else text).encode()


def has_tag(condition: str, tag: str) -> bool:
    """Whether an If-None-Match header matches `tag`; it compares weakly."""
    tags = [each.strip().removeprefix("W/") for each in condition.split(",")]
    return tag in tags or tags == ["*"]
