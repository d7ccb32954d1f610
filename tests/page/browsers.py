"""The browser that `make test` installs, or Debian's, and pages in it that tell of every error."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".page/browser"
OWN = FOLDER / "chromium"
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--no-zygote",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
TIMEOUT_MS = 20_000


def executable() -> str:
    found = str(OWN) if OWN.is_file() else shutil.which("chromium")
    if found is None:
        pytest.skip("there is no browser: `make .page/.created` installs one with npm, `apt-get install chromium` too")
    return found


@contextmanager
def running_browser(fonts: Path | None = None) -> Iterator[Browser]:
    """`fonts`: a configuration of fontconfig."""
    program = executable()
    env: dict[str, str | float | bool] = {**os.environ}
    if program == str(OWN):
        env["LD_LIBRARY_PATH"] = f"{FOLDER / 'lib'}:{FOLDER}"
    if fonts is not None:
        env["FONTCONFIG_FILE"] = str(fonts)
    expect.set_options(timeout=TIMEOUT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=[*FLAGS], env=env)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, url: str, *, expected: Sequence[str] = (), **options: Any) -> Iterator[Page]:
    """A page of a browser that knows nothing yet. What it says is wrong fails the test, but texts with `expected`."""
    context = browser.new_context(**{"locale": "en-US", "viewport": {"width": 1200, "height": 800}, **options})
    context.set_default_timeout(TIMEOUT_MS)
    problems: list[str] = []

    def hear(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not any(each in message.text for each in expected):
            problems.append(message.text)

    page = context.new_page()
    page.on("console", hear)
    page.on("pageerror", lambda error: problems.append(str(error)))
    try:
        page.goto(url)
        yield page
    finally:
        context.close()
    assert not problems, "\n".join(problems)
