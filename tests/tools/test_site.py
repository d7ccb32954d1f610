"""`make docs`: the site is built from the repository's pages, every link leads somewhere, and it asks no other host."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from llmserve.frontends.shared.restrictions import CALLS
from llmserve.frontends.text.routes import PATHS
from tools.site import api, pages

ROOT = Path(__file__).resolve().parents[2]
LOADED = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}
OTHER_HOST = re.compile(r"(?:https?:)?//")


class Loaded(HTMLParser):
    """What a browser fetches by itself to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.urls += [value for name, value in attrs if name == LOADED.get(tag) and value]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "docs"
    done = subprocess.run(
        [sys.executable, "-m", "tools.site", folder], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_guide_is_a_page_that_the_front_page_leads_to(site: Path) -> None:
    front = (site / "index.html").read_text()
    guides = sorted((ROOT / "docs").glob("*.md"))
    assert [page.stem for page in guides if f'href="docs/{page.stem}.html"' not in front] == []
    assert re.search(r'href="README_zh.html"[^>]*>中文<', front)
    assert "Close the connection." in front


def test_no_page_asks_another_host(site: Path) -> None:
    for page in site.rglob("*.html"):
        reader = Loaded()
        reader.feed(page.read_text())
        assert reader.urls
        assert [url for url in reader.urls if OTHER_HOST.match(url)] == [], page.name
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"(?:@import|url\()\s*['\"]?(?:https?:)?//[^)'\"]*", styles) == []


def test_the_reference_has_every_route_and_every_field(site: Path) -> None:
    text = api.api_reference()
    for method, path in PATHS:
        if path != "/openapi.json":
            assert f"### {method} {path}\n" in text
    for calls in CALLS.values():
        assert all(f"/{rpc}`" in text for rpc in calls.rpcs)
    assert "| POST | `/v2/models/{model}[/versions/{version}]/infer` | inference |" in text
    assert "| `temperature` |" in text
    assert 'id="post-v1-chat-completions"' in (site / "reference/api.html").read_text()


def test_the_reference_has_every_command(site: Path) -> None:
    text = (site / "reference/commands.html").read_text()
    assert "--max-kv-tokens" in text
    assert "llmserve export" in text


WRONG = {"page": "[gone](gone.md)", "heading": "[here](#nowhere)", "other": "[there](serve.md#nowhere)"}


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a small site with a page for each wrong link."""
    folder = tmp_path_factory.mktemp("wrong")
    pages.write_pages(folder / "pages")
    for other in (folder / "pages").rglob("*.md"):
        if other.name not in ("index.md", "serve.md"):
            other.unlink()
    (folder / "pages/docs/serve.md").write_text("# Serving\n")
    entries = "".join(f"docs/{name}\n" for name in ("serve", *WRONG))
    (folder / "pages/index.md").write_text(f"# Front\n\n```{{toctree}}\n{entries}```\n")
    for name, link in WRONG.items():
        (folder / f"pages/docs/{name}.md").write_text(f"# Wrong\n\n{link}\n")
    settings = ["-q", "-W", "--keep-going", "-c", str(ROOT / "tools/site")]
    command = [sys.executable, "-m", "sphinx", *settings, str(folder / "pages"), str(folder / "site")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    return done.stderr


@pytest.mark.parametrize("name", WRONG)
def test_a_link_that_leads_nowhere_is_an_error(name: str, complaints: str) -> None:
    (line,) = [line for line in complaints.splitlines() if f"docs/{name}.md" in line]
    assert "WARNING" in line
