"""Conversations that the browser keeps: versions of an answer, more of one, the list, and files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, expect

from tests.e2e.conftest import ServerProcess
from tests.page.browsers import opened
from tests.page.steps import (
    ANSWER,
    QUESTION,
    answer_with,
    ask,
    body_text,
    contents,
    last_answer,
    posted,
    set_fields,
    settled,
)

MARKUP = '<img src=x onerror="window.hurt = 1">'
KEPT: dict[str, Any] = {
    "format": "llmserve conversations",
    "conversations": [
        {
            "title": MARKUP,
            "__proto__": {"hurt": 1},
            "messages": [
                {"role": "user", "content": f"Which? {MARKUP}", "parent": -1, "files": [], "onclick": "hurt"},
                {"role": "assistant", "content": f"**{MARKUP}** one", "parent": 0, "isShown": False},
                {"role": "assistant", "content": "two", "parent": 0, "state": "writing", "problem": MARKUP},
            ],
        }
    ],
}


def changed(place: str, value: object) -> str:
    """The file with one thing in it that is not as it has to be; `place`: its keys."""
    made = copy.deepcopy(KEPT)
    *way, last = [int(key) if key.isdigit() else key for key in place.split()]
    found: Any = made
    for key in way:
        found = found[key]
    found[last] = value
    return json.dumps(made)


BROKEN = {
    "not JSON": "{",
    "another file": json.dumps({"format": "other", "conversations": []}),
    "no list": changed("conversations", {"0": 1}),
    "null": changed("conversations 0", None),
    "title": changed("conversations 0 title", {"toString": 1}),
    "role": changed("conversations 0 messages 1 role", "system"),
    "content": changed("conversations 0 messages 0 content", ["a"]),
    "long": changed("conversations 0 messages 0 content", "a" * 2_000_001),
    "parent": changed("conversations 0 messages 1 parent", 1),
    "state": changed("conversations 0 messages 1 state", "x"),
    "usage": changed("conversations 0 messages 1 usage", {"prompt_tokens": "1"}),
    "file": changed("conversations 0 messages 0 files", [{"name": 1, "text": "a"}]),
    "many": changed("conversations 0 messages", [{"role": "user"}] * 2_001),
}


def open_list(page: Page) -> None:
    page.get_by_role("button", name="Conversations", exact=True).click()


def titles(page: Page) -> list[str]:
    return page.locator("#chat-list .open span").all_inner_texts()


def read_file(page: Page, content: str | bytes) -> None:
    content = content.encode() if isinstance(content, str) else content
    page.locator("#chat-file").set_input_files({"name": "a.json", "mimeType": "application/json", "buffer": content})


def test_an_answer_has_versions(page: Page) -> None:
    answer_with(page, contents(["one"]))
    first = settled(ask(page, "Which?"))
    expect(first.locator(".versions")).to_be_hidden()
    answer_with(page, contents(["two"]))
    first.get_by_role("button", name="Regenerate").click()
    expect(last_answer(page).locator(".versions")).to_have_text("2/2")
    assert body_text(settled(last_answer(page))) == "two"
    settled(ask(page, "After two"))
    page.get_by_role("button", name="Previous version").click()
    expect(page.locator(".message")).to_have_count(2)
    assert body_text(last_answer(page)) == "one"
    with page.expect_request("**/v1/chat/completions") as asked:
        settled(ask(page, "After one"))
    assert [message["content"] for message in posted(asked.value)["messages"]] == ["Which?", "one", "After one"]
    page.reload()
    expect(page.locator(".message")).to_have_count(4)
    page.get_by_role("button", name="Next version").click()
    expect(page.locator(".message.user").last).to_contain_text("After two")
    page.locator(".message.user").first.get_by_role("button", name="Edit").click()
    page.get_by_role("textbox", name="Edit").fill("Another?")
    page.keyboard.press("Enter")
    settled(last_answer(page))
    expect(page.locator(".message.user .versions")).to_have_text("2/2")
    page.locator(".message.user").get_by_role("button", name="Previous version").click()
    expect(page.locator(".message")).to_have_count(4)


def test_a_cut_answer_is_continued(page: Page) -> None:
    set_fields(page, temperature="0", max_tokens="2")
    answer = settled(ask(page))
    beginning = body_text(answer)
    assert ANSWER.startswith(beginning)
    assert beginning != ANSWER
    assert "stopped at the token limit" in answer.locator(".numbers").inner_text()
    set_fields(page, max_tokens="", format="regex", regex="[0-9]{3}")  # a form is one of whole answers
    with page.expect_request("**/v1/chat/completions") as asked:
        answer.get_by_role("button", name="Continue").click()
    assert posted(asked.value)["messages"][1:] == [{"role": "assistant", "content": beginning}]
    assert body_text(settled(answer)) == ANSWER
    numbers = answer.locator(".numbers").inner_text()
    assert numbers.startswith("5 tokens"), numbers
    assert "complete" in numbers
    expect(answer.get_by_role("button", name="Continue")).to_be_hidden()
    expect(page.locator(".message")).to_have_count(2)


def test_a_lost_answer_is_continued(page: Page) -> None:
    line = f"data: {json.dumps({'choices': [{'delta': {'content': 'Close the'}, 'finish_reason': None}]})}\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=line, content_type="text/event-stream"))
    set_fields(page, temperature="0")
    answer = settled(ask(page))
    expect(answer.get_by_role("alert")).to_contain_text("The connection to the server was lost")
    page.unroute("**/v1/chat/completions")
    answer.get_by_role("button", name="Continue").click()
    assert body_text(settled(answer)) == ANSWER
    expect(answer.get_by_role("alert")).to_be_hidden()


def test_conversations_are_found_renamed_and_deleted(page: Page) -> None:
    answer_with(page, contents(["About boats"]))
    settled(ask(page, "First question\nin two lines"))
    page.get_by_role("button", name="New conversation").click()
    answer_with(page, contents(["About fish"]))
    settled(ask(page, "Second question"))
    open_list(page)
    assert titles(page) == ["Second question", "First question"]
    expect(page.locator("#chat-list [aria-current]")).to_contain_text("Second")
    page.get_by_label("Search").fill("boats first")
    assert titles(page) == ["First question"]
    page.get_by_label("Search").fill("horses")
    expect(page.locator("#chat-list")).to_have_text("No results.")
    page.get_by_label("Search").fill("")
    page.locator("#chat-list .open").nth(1).click()
    assert body_text(last_answer(page)) == "About boats"
    page.locator("#chat-list li").nth(1).get_by_role("button", name="Rename").click()
    page.keyboard.type("Boats")
    page.keyboard.press("Enter")
    expect(page.locator("#chat-list .open").nth(1)).to_contain_text("Boats")
    other = page.context.new_page()
    other.goto(page.url)
    expect(other.locator(".message")).to_have_count(0)  # each tab has its own, of one list
    expect(other.locator("#chat-list")).to_be_visible()  # as it was left
    assert titles(other) == ["Second question", "Boats"]
    other.locator("#chat-list li").nth(1).get_by_role("button", name="Delete").click()
    expect(other.get_by_role("dialog")).to_contain_text("Delete permanently?")
    other.get_by_role("button", name="Cancel").click()
    assert len(titles(other)) == 2
    other.locator("#chat-list li").nth(1).get_by_role("button", name="Delete").click()
    other.get_by_role("button", name="OK").click()
    expect(page.locator("#chat-list li")).to_have_count(1)
    page.get_by_role("button", name="Delete all").click()
    page.get_by_role("button", name="OK").click()
    expect(page.locator("#chat-list")).to_contain_text("only in this browser")
    assert [key for key in page.evaluate("Object.keys(localStorage)") if "chat." in key] == []


def test_a_deleted_conversation_does_not_come_back(page: Page) -> None:
    set_fields(page, format="regex", regex="(word ){2000}")
    expect(ask(page).locator(".body")).to_contain_text("word word")
    open_list(page)
    page.locator("#chat-list").get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="OK").click()
    expect(page.locator(".message")).to_have_count(0)
    expect(page.locator("#send")).to_be_visible()
    assert titles(page) == []


def test_a_file_carries_conversations_to_another_browser(
    browser: Browser, server: ServerProcess, tmp_path: Path
) -> None:
    with opened(browser, server.http) as page:
        set_fields(page, temperature="0", max_tokens="2")
        settled(ask(page))
        page.get_by_role("button", name="Regenerate").click()
        settled(last_answer(page))
        open_list(page)
        with page.expect_download() as download:
            page.get_by_role("button", name="Export all").click()
        download.value.save_as(tmp_path / "kept.json")
    with opened(browser, server.http) as page:
        open_list(page)
        read_file(page, (tmp_path / "kept.json").read_bytes())
        expect(page.locator("#chat-notice")).to_have_text("Imported: 1")
        page.locator("#chat-list .open").click()
        expect(page.locator(".message.user")).to_have_text(QUESTION)
        expect(last_answer(page).locator(".versions")).to_have_text("2/2")
        assert "2 tokens" in last_answer(page).locator(".numbers").inner_text()
        set_fields(page, temperature="0", max_tokens="")
        last_answer(page).get_by_role("button", name="Continue").click()
        assert body_text(settled(last_answer(page))) == ANSWER
        with page.expect_download() as download:
            page.get_by_role("button", name="Export", exact=True).click()
        again = json.loads(Path(download.value.path()).read_text())
        assert [each["content"] for each in again["conversations"][0]["messages"]][-1] == ANSWER


def test_what_a_file_says_stays_text(page: Page) -> None:
    open_list(page)
    read_file(page, json.dumps(KEPT))
    expect(page.locator("#chat-notice")).to_have_text("Imported: 1")
    assert titles(page) == [MARKUP]
    page.locator("#chat-list .open").click()
    expect(page.locator(".message.user .body")).to_have_text(f"Which? {MARKUP}")
    assert body_text(last_answer(page)) == "two"
    expect(last_answer(page)).to_have_attribute("aria-busy", "false")
    page.get_by_role("button", name="Previous version").click()
    assert body_text(last_answer(page)) == f"{MARKUP} one"
    assert page.evaluate("[window.hurt, ({}).hurt, document.querySelectorAll('img').length]") == [None, None, 0]


def test_a_conversation_that_an_answer_begins_is_listed(page: Page) -> None:
    open_list(page)
    silent = {"messages": [{"role": "assistant", "content": ""}]}
    read_file(page, json.dumps({**KEPT, "conversations": [silent, *KEPT["conversations"]]}))
    expect(page.locator("#chat-notice")).to_have_text("Imported: 2")
    assert sorted(titles(page)) == ["", MARKUP]


def test_a_file_that_is_none_is_refused(page: Page) -> None:
    open_list(page)
    for what, content in BROKEN.items():
        page.locator("#chat-notice").evaluate("notice => notice.textContent = ''")
        read_file(page, content)
        expect(page.locator("#chat-notice"), what).to_contain_text("This file cannot be imported: ")
    read_file(page, b" " * 20_000_001)
    expect(page.locator("#chat-notice")).to_contain_text("larger than 20 MB")
    assert titles(page) == []


def test_a_browser_without_room_says_so(page: Page) -> None:
    page.evaluate(
        "() => { Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError') } }"
    )
    answer_with(page, contents(["one"]))
    settled(ask(page, "Which?"))
    expect(page.locator("#unkept")).to_contain_text("this conversation will not be saved")
    open_list(page)
    read_file(page, json.dumps(KEPT))
    expect(page.locator("#chat-notice")).to_contain_text("0 of 1 were imported")
