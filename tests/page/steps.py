"""What somebody does on the page."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Locator, Page, Request, expect

QUESTION = "Summarize: The connection is closed. Any pending data is sent before."
ANSWER = "Close the connection."
ENGINE = "talkative-fp16"
# The demo model has little to say by itself.
ENDLESS = "(word ){2000}"
LONG = "[a-z ]{300,400}"


def set_fields(page: Page, **values: str) -> None:
    """Of the settings, by their names in the form."""
    if page.locator("#settings").is_hidden():
        page.get_by_role("button", name="Settings", exact=True).click()
    for name, value in values.items():
        field = page.locator(f"#settings [name={name}]")
        if name == "format":
            field.select_option(value)
        else:
            field.fill(value)


def ask(page: Page, text: str = QUESTION) -> Locator:
    """The message with the answer, which may still come."""
    expect(page.locator("#send")).to_be_enabled()
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    return last_answer(page)


def last_answer(page: Page) -> Locator:
    return page.locator(".message.assistant").last


def settled(answer: Locator) -> Locator:
    """When nothing more comes."""
    expect(answer).to_have_attribute("aria-busy", "false")
    return answer


def body_text(answer: Locator) -> str:
    return answer.locator(".body").inner_text()


def posted(request: Request) -> Any:
    """The body."""
    return request.post_data_json
