"""Which files of the repository are pages, their part of the site, and generated pages.

The folder that Sphinx reads has the repository's layout, so links between pages need no change.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tools.site.api import api_reference
from tools.site.commands import command_reference

ROOT = Path(__file__).resolve().parents[2]
FRONT = "README.md"  # the front page, `index`
CHINESE = "中文 <README_zh>"  # its own title is the same as the front page's
OTHERS = ("README_zh.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "tests/fakes/README.md")
# Guides that are not listed come last in the second part.
PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("First steps", (
        "docs/getting-started", "docs/serve", "docs/openai", "docs/page", "docs/cli", "docs/build", "docs/migrating",
        CHINESE,
    )),
    ("Guides", (
        "docs/quantization", "docs/cuda", "docs/eval", "docs/releasing", "docs/rollout", "docs/security",
        "docs/operations", "docs/troubleshooting", "docs/examples/README", "docs/wheels",
    )),
    ("Reference", (
        "reference/api", "reference/commands", "docs/protocol", "docs/metrics", "docs/compatibility",
        "docs/determinism", "docs/benchmarks/README",
    )),
    ("The project", ("docs/architecture", "CONTRIBUTING", "CHANGELOG", "SECURITY", "tests/fakes/README")),
)  # fmt: skip
LINK_TO_FRONT = re.compile(r"(\]\((?:\.\./)*)README\.md(?=[)#])")
FENCES = {
    "```bash background\n": "```bash\n",
    "```output\n": "```text\n",
}  # marks for tests, which are not names of languages


def write_pages(folder: Path) -> None:
    """Writes all files that Sphinx reads."""
    shutil.copytree(ROOT / "docs", folder / "docs")
    for name in (FRONT, *OTHERS):
        target = folder / ("index.md" if name == FRONT else name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
    reference = folder / "reference"
    reference.mkdir()
    (reference / "api.md").write_text(api_reference())
    (reference / "commands.md").write_text(command_reference())
    for page in folder.rglob("*.md"):
        page.write_text(_as_page(page.read_text(), at_the_root=page.parent == folder))
    for listing in ("docs/examples/README.md", "docs/benchmarks/README.md"):
        _append(folder / listing, _contents("", _pages_below((folder / listing).parent)))
    _append(folder / "index.md", "".join(_contents(caption, pages) for caption, pages in _parts(folder)))


def _as_page(text: str, *, at_the_root: bool) -> str:
    for fence, plain in FENCES.items():
        text = text.replace(fence, plain)
    return LINK_TO_FRONT.sub(r"\1index.md", text) if at_the_root else text


def _parts(folder: Path) -> list[tuple[str, list[str]]]:
    placed = {page for _, pages in PARTS for page in pages}
    others = sorted(f"docs/{path.stem}" for path in (folder / "docs").glob("*.md") if f"docs/{path.stem}" not in placed)
    parts = [(caption, list(pages)) for caption, pages in PARTS]
    parts[1][1].extend(others)
    return parts


def _pages_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.md"))


def _contents(caption: str, pages: list[str]) -> str:
    lines = [line for page in pages if (line := page) != "README"]
    head = ["```{toctree}", ":hidden:", *([f":caption: {caption}"] if caption else []), ""]
    return "\n".join(["", *head, *lines, "```", ""])


def _append(page: Path, text: str) -> None:
    page.write_text(page.read_text() + text)
