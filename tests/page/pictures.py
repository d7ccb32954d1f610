"""The pictures of the page in docs/images: SmolLM2 answers, in the browser and the fonts that `make` has fetched."""

from __future__ import annotations

import json
import re
import signal
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, expect

from tests.e2e.conftest import ROOT, ServerProcess, llmserve, start_server
from tests.page.browsers import opened, running_browser
from tests.page.steps import last_answer, set_fields, settled

IMAGES = ROOT / "docs/images"
ENGINE = ROOT / ".page/smollm2-135m-instruct-int8"
FONTS = ROOT / ".page/fonts"
MOST_BYTES = 150_000
CONFIGURATION = f"""<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <dir>{FONTS}</dir>
  <dir>/usr/share/fonts</dir>
  <cachedir>{FONTS}/cache</cachedir>
  <alias><family>system-ui</family><prefer><family>Inter</family><family>WenQuanYi Micro Hei</family></prefer></alias>
  <alias><family>sans-serif</family><prefer><family>Inter</family><family>WenQuanYi Micro Hei</family></prefer></alias>
  <alias><family>monospace</family><prefer><family>DejaVu Sans Mono</family></prefer></alias>
</fontconfig>
"""
DESKTOP: dict[str, Any] = {"viewport": {"width": 1280, "height": 800}}
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 780}, "is_mobile": True, "has_touch": True}
TEXT = {"type": "string"}
CITY = {
    "type": "object",
    "properties": {"city": TEXT, "country": TEXT},
    "required": ["city", "country"],
    "additionalProperties": False,
}


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    if not ENGINE.exists():
        gguf = ROOT / "models/smollm2-135m-instruct.gguf"
        done = llmserve("build", str(gguf), "--quantization", "int8", "--output-dir", str(ENGINE))
        assert done.returncode == 0, done.stderr
    running = start_server(str(ENGINE))
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".conf") as fonts:
            fonts.write(CONFIGURATION)
            fonts.flush()
            with running_browser(Path(fonts.name)) as browser:
                take(browser, running)
    finally:
        running.process.send_signal(signal.SIGTERM)
        running.process.wait(timeout=60)


def take(browser: Browser, running: ServerProcess) -> None:
    with opened(browser, running.http, **DESKTOP, color_scheme="light") as page:
        set_fields(page, temperature="0", max_tokens="160")
        page.keyboard.press("Alt+KeyM")
        page.wait_for_timeout(4000)
        for question in ("What is gravity?", "Write a short poem about rivers.", "Why do birds sing?"):
            talk(page, question)
            page.wait_for_timeout(4000)
        page.keyboard.press("Alt+KeyN")
        talk(page, "Give me three tips for writing clear documentation.")
        page.keyboard.press("Alt+KeyL")
        page.wait_for_timeout(1500)
        save(page, "page-light.png")
    with opened(browser, running.http, **DESKTOP, color_scheme="dark") as page:
        set_fields(page, temperature="0.3", seed="3", max_tokens="120")
        page.get_by_label("Token probabilities").check()
        talk(page, "Explain what a hash table is, to a child.")
        page.locator(".token").nth(9).hover()
        save(page, "page-tokens-dark.png")
    with opened(browser, running.http, **PHONE, color_scheme="light") as page:
        set_fields(page, temperature="0", max_tokens="160")
        page.locator("#settings .close").click()
        talk(page, "Write a Python function that adds two numbers.")
        save(page, "page-phone.png")
    with opened(browser, running.http, **DESKTOP, locale="zh-CN", color_scheme="light") as page:
        page.keyboard.press("Alt+KeyS")
        page.locator("[name=temperature]").fill("0")
        page.locator("[name=format]").select_option("json_schema")
        page.locator("[name=schema]").fill(json.dumps(CITY, indent=2))
        talk(page, "Which city is the Eiffel Tower in?")
        page.locator("[name=schema]").evaluate("field => field.scrollTop = 0")
        save(page, "page-zh.png")


def talk(page: Page, *questions: str) -> None:
    for question in questions:
        expect(page.locator("#send")).to_be_enabled()
        page.locator("#message").fill(question)
        page.locator("#message").press("Enter")
        settled(last_answer(page))
        expect(last_answer(page).locator(".numbers")).to_contain_text(re.compile("token|词元"))
    page.mouse.move(4, 400)


def save(page: Page, name: str) -> None:
    options: dict[str, Any] = {"path": IMAGES / name, "animations": "disabled"}
    size = len(page.screenshot(**options))
    assert size < MOST_BYTES, f"{name} has {size} bytes"
    print(f"{IMAGES / name}: {size:,} bytes")


if __name__ == "__main__":
    main()
