"""`make docs`: builds the site in dist/docs. A broken link, or a page that is in no part, is an error."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.site.pages import ROOT, write_pages

SITE = ROOT / "dist/docs"


def build(site: Path) -> int:
    """Returns Sphinx's exit code. Deletes the contents of `site` first, so that no old page remains."""
    with tempfile.TemporaryDirectory() as folder:
        write_pages(Path(folder))
        if site.exists():
            shutil.rmtree(site)
        command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "--builder", "html"]
        settings = ["--conf-dir", str(Path(__file__).parent), "--doctree-dir", f"{folder}/.doctrees"]
        return subprocess.run([*command, *settings, folder, str(site)], check=False).returncode


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else SITE
    if code := build(target):
        sys.exit(code)
    print(f"the site begins at {target / 'index.html'}")
