"""What is around the conversation: tokens, the server's panel, keys, looks, languages, the keyboard, a phone."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from llmserve.engine.directory.gate_record import RECORDS_FILE
from tests.e2e.conftest import ServerProcess, start_server
from tests.gate_records import add_gate_record
from tests.page.browsers import opened
from tests.page.conftest import KV_TOKENS
from tests.page.steps import (
    ANSWER,
    ENGINE,
    LONG,
    QUESTION,
    answer_with,
    ask,
    body_text,
    contents,
    last_answer,
    set_fields,
    settled,
)  # fmt: skip

KEY = "a-key-of-sixteen-characters"
PHONE: dict[str, Any] = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
SHOWN_BUTTONS = (
    "() => [...document.querySelectorAll('button, select, input, textarea')].filter(e => e.checkVisibility())"
)


@pytest.fixture(scope="module")
def judged(engine: Path) -> Iterator[ServerProcess]:
    """A server that wants a key, with an engine that has been evaluated."""
    digest = json.loads((engine / "manifest.json").read_text())["engine_digest"]
    add_gate_record(engine, digest, "docstrings")
    running = start_server(str(engine), *KV_TOKENS, env={**os.environ, "LLMSERVE_API_KEY": KEY})
    yield running
    (engine / RECORDS_FILE).unlink()
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(timeout=60) == 0


def background(page: Page) -> str:
    found: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return found


def test_each_token_tells_its_probability(page: Page) -> None:
    set_fields(page, temperature="0")
    page.get_by_label("Token probabilities").check()
    answer = settled(ask(page))
    tokens = answer.locator(".token")
    assert "".join(tokens.all_inner_texts()).strip().removesuffix("</s>").strip() == ANSWER
    assert f"{tokens.count()} tokens" in answer.locator(".numbers").inner_text()
    card = page.locator("#token-card")
    expect(card).to_be_hidden()
    tokens.nth(1).hover()
    expect(card.locator(".row")).to_have_count(5)
    shares = [float(row.split()[-2]) for row in card.locator(".row").all_inner_texts()]
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 100.5
    expect(card.locator(".row.chosen")).to_have_count(1)
    page.get_by_label("Message", exact=True).hover()
    expect(card).to_be_hidden()
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    expect(card).to_be_visible()
    assert re.search(r", [\d.]+ %$", tokens.nth(1).get_attribute("aria-label") or "")
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()
    answer.get_by_role("button", name="Show as text").click()
    assert body_text(answer) == ANSWER
    expect(answer.get_by_role("button", name="Show each token's probability")).to_be_focused()


def test_characters_of_several_tokens_are_whole(page: Page) -> None:
    set_fields(page, format="regex", regex="[\N{SNOWMAN}\N{GRINNING FACE}]{6}")
    page.get_by_label("Token probabilities").check()
    answer = settled(ask(page))
    text = "".join(answer.locator(".token").all_inner_texts())
    assert re.match("[\N{SNOWMAN}\N{GRINNING FACE}]{6}", text), text


def test_line_breaks_between_tokens_do_not_tear_json_apart(page: Page) -> None:
    pieces = ["{", "\n\n\n ", ' "', "city", '"', "\n", ":", " [", "\n1", ",\n", "2", "\n", "]", "\n}"]
    answer_with(page, contents(pieces), scored=True)
    set_fields(page, format="json_object")
    answer = settled(ask(page))
    assert body_text(answer) == '{\n  "city": [\n1,\n2]}'
    expect(answer.locator(".line")).to_have_count(8)  # and each is shown
    answer.get_by_role("button", name="Show as text").click()
    assert json.loads(body_text(answer)) == {"city": [1, 2]}
    page.get_by_role("button", name="New conversation").click()
    set_fields(page, format="text")
    assert body_text(settled(ask(page))) == "".join(pieces)


def test_the_server_panel_tells_engine_and_load(page: Page, engine: Path) -> None:
    manifest = json.loads((engine / "manifest.json").read_text())
    expect(page.locator("#welcome-engine")).to_have_text(f"{ENGINE} · float16 · cpu")
    header = page.locator("#engine-name")
    expect(header).to_have_text(f"{ENGINE} {manifest['engine_digest'][:8]}")
    expect(page.locator("#model")).to_be_hidden()  # there is no other
    header.click()
    facts = page.locator("#facts")
    for fact in (ENGINE, "BaichuanForCausalLM", "float16", "cpu", manifest["engine_digest"][:12]):
        expect(facts).to_contain_text(fact)
    charts = {name: page.locator("figure", has_text=name) for name in ("Tokens per second", "first token", "KV cache")}
    expect(charts["KV cache"]).to_contain_text("used 0")
    with page.expect_response("**/metrics"):
        pass
    set_fields(page, format="regex", regex=LONG)
    page.get_by_role("button", name="Server", exact=True).click()
    settled(ask(page))
    expect(charts["first token"]).to_contain_text(re.compile(r"mean [\d.]+ m?s"))
    expect(charts["Tokens per second"]).to_contain_text(re.compile(r"generated [1-9][\d.,]*"))
    for chart in charts.values():
        label = chart.locator("svg").get_attribute("aria-label") or ""
        assert re.search(r": \w+ [\d.]", label), label
        expect(chart.locator("path.one")).to_have_attribute("d", re.compile("^M.*L"))
    page.get_by_role("button", name="Close").last.click()
    expect(page.get_by_role("button", name="Server", exact=True)).to_be_focused()


def test_every_name_of_a_model_has_its_engine(browser: Browser, engine: Path) -> None:
    """What makes vectors beside it is not offered."""
    running = start_server(str(engine), *KV_TOKENS, "--served-model-name", "mine/net", "--served-model-name", "other")
    try:
        with opened(browser, f"{running.http}/page/icon.svg") as page:  # that the script comes later

            def with_an_embedder(route: Route) -> None:
                document = route.fetch().json()
                vectors = {"id": "vectors", "engine": {"pooling": {"makes": "embeddings"}}}
                route.fulfill(json={**document, "data": [vectors, *document["data"]]})

            page.route("**/v1/models", with_an_embedder)
            page.goto(running.http)
            expect(page.locator("#model option")).to_have_text(["mine/net", "other"])
            for name in ("mine/net", "other"):
                page.locator("#model").select_option(name)
                expect(page.locator("#engine-name")).to_contain_text(ENGINE)
            page.get_by_role("button", name="Server", exact=True).click()
            expect(page.locator("figure", has_text="KV cache")).to_contain_text("used 0")
    finally:
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(timeout=60) == 0


def test_nothing_is_asked_while_nobody_looks(page: Page) -> None:
    expect(page.locator("#welcome-engine")).not_to_be_empty()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(2500)
    assert not any(url.endswith("/metrics") for url in asked)


def test_a_key_is_asked_for_and_kept_for_the_tab(browser: Browser, judged: ServerProcess) -> None:
    with opened(browser, judged.http, expected=["401"]) as page:
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("This server requires an API key")
        expect(dialog).to_contain_text("Kept until this tab is closed")
        page.keyboard.type("wrong-key-of-sixteen-characters")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("not valid")
        page.get_by_label("API key").last.fill(KEY)
        page.get_by_role("button", name="Use this key").click()
        expect(dialog).to_be_hidden()
        expect(page.locator("#model")).to_have_value("ensemble")
        set_fields(page, temperature="0")
        assert body_text(settled(ask(page))) == ANSWER
        page.get_by_role("button", name="Server", exact=True).click()
        expect(page.locator("#facts")).to_contain_text("passed docstrings")
        page.reload()
        expect(page.locator("#model")).to_have_value("ensemble")
        assert KEY in page.evaluate("JSON.stringify(sessionStorage)")
        assert KEY not in page.evaluate("JSON.stringify(localStorage) + document.cookie + location.href")
        set_fields(page)
        page.locator("#api-key").fill("")
        page.locator("#api-key").blur()
        expect(dialog).to_be_visible()
        page.get_by_role("button", name="Cancel").click()
        assert page.evaluate("sessionStorage.getItem('llmserve.key')") is None


def test_both_languages(browser: Browser, server: ServerProcess) -> None:
    with opened(browser, server.http, locale="zh-CN") as page:
        expect(page.locator("html")).to_have_attribute("lang", "zh-CN")
        expect(page.get_by_label("消息", exact=True)).to_have_attribute("placeholder", "输入消息")
        expect(page.locator("#health")).to_contain_text("就绪")
        page.get_by_role("button", name="设置").click()
        page.locator("[name=temperature]").fill("0")
        page.get_by_label("消息", exact=True).fill(QUESTION)
        page.keyboard.press("Enter")
        assert "个词元" in settled(last_answer(page)).locator(".numbers").inner_text()
        page.get_by_role("button", name="English").click()
        expect(page.get_by_label("Message", exact=True)).to_have_attribute("placeholder", "Write a message")
        assert "complete" in last_answer(page).locator(".numbers").inner_text()
        page.reload()
        expect(page.locator("html")).to_have_attribute("lang", "en")
        page.get_by_role("button", name="中文").click()
        expect(page.locator("#settings h2")).to_have_text("设置")


def test_dark_and_light(browser: Browser, server: ServerProcess) -> None:
    with opened(browser, server.http, color_scheme="dark") as page:
        dark = background(page)
        expect(page.get_by_role("button", name="Theme: system")).to_be_visible()
        page.get_by_role("button", name="Theme: system").click()
        light = background(page)
        assert light != dark
        page.reload()
        assert background(page) == light
        page.get_by_role("button", name="Theme: light").click()
        page.emulate_media(color_scheme="light")
        assert background(page) == dark
        page.get_by_role("button", name="Theme: dark").click()
        assert background(page) == light


def test_a_phone_has_room_for_everything(browser: Browser, server: ServerProcess) -> None:
    with opened(browser, server.http, **PHONE) as page:
        set_fields(page, max_tokens="20")
        page.locator("#settings .close").tap()
        settled(ask(page, QUESTION + " x" * 60))
        for panel in ("", "Conversations", "Settings", "Server"):
            if panel:
                page.get_by_role("button", name=panel, exact=True).click()
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            wide = page.evaluate(
                f"({SHOWN_BUTTONS})().map(e => [e.outerHTML.slice(0, 80), e.getBoundingClientRect()])"
                ".filter(([_, r]) => r.right > innerWidth + 1 || r.left < -1).map(([html]) => html)"
            )
            assert wide == []
            if panel:
                page.locator(".panel:visible .close").tap()
        small = page.evaluate(
            f"({SHOWN_BUTTONS})().filter(e => e.type !== 'checkbox' && e.getBoundingClientRect().height < 30)"
            ".map(e => e.outerHTML.slice(0, 80))"
        )
        assert small == []


def test_everything_can_be_reached_with_the_keyboard(page: Page) -> None:
    message = page.get_by_label("Message", exact=True)
    expect(message).to_be_focused()
    expect(page.locator("#model")).to_be_enabled()
    page.locator("body").press("Alt+KeyS")
    expect(page.locator("[name=system]")).to_be_focused()
    set_fields(page, max_tokens="8")
    page.keyboard.press("Escape")
    expect(page.locator("#settings")).to_be_hidden()
    expect(page.locator("#open-settings")).to_be_focused()
    page.keyboard.press("/")
    expect(message).to_be_focused()
    expect(message).to_have_value("")
    page.keyboard.press("Alt+KeyM")
    expect(page.locator("#server")).to_be_visible()
    page.keyboard.press("Alt+KeyM")
    page.keyboard.press("Alt+KeyK")
    expect(page.get_by_role("dialog")).to_contain_text("Regenerate")
    page.keyboard.press("Escape")
    message.fill("a")
    message.press("Shift+Enter")
    expect(message).to_have_value("a\n")
    message.press("Enter")
    settled(last_answer(page))
    with page.expect_request("**/v1/chat/completions"):
        page.keyboard.press("Alt+KeyR")
    settled(last_answer(page))
    page.keyboard.press("Alt+KeyN")
    expect(page.locator(".message")).to_have_count(0)
    page.reload()
    expect(page.locator("#model")).to_be_enabled()
    expect(page.locator("#engine-name")).to_be_visible()
    page.locator(".skip").focus()
    order = []
    for _ in range(11):
        order.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
        page.keyboard.press("Tab")
    assert order == [
        "skip", "open-chats", "engine-name", "new-chat", "open-settings", "open-server", "theme", "language", "attach",
        "message", "send",
    ]  # fmt: skip


def test_every_control_has_a_name(page: Page) -> None:
    set_fields(page, max_tokens="8")
    settled(ask(page))
    nameless = page.evaluate(
        f"({SHOWN_BUTTONS})().filter(e => !(e.ariaLabel || e.labels?.[0]?.innerText || e.innerText).trim())"
        ".map(e => e.outerHTML.slice(0, 80))"
    )
    assert nameless == []
