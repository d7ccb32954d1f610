"""What somebody does on the page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from playwright.sync_api import Locator, Page, Request, Route, expect

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


def contents(pieces: Iterable[str]) -> list[dict[str, str]]:
    """Deltas."""
    return [{"content": piece} for piece in pieces]


def answer_with(
    page: Page, deltas: Sequence[Mapping[str, str]], *, finish: str = "stop", scored: bool = False, **more: Any
) -> None:
    """Instead of the model. `scored`: each delta is a token with a log prob."""

    def choice(delta: Mapping[str, str]) -> dict[str, Any]:
        text = delta.get("content", "")
        token = {"token": text, "bytes": [*text.encode()], "logprob": -0.5, "top_logprobs": []}
        return {"delta": delta, "finish_reason": None, **({"logprobs": {"content": [token]}} if scored else {})}

    def fulfill(route: Route) -> None:
        chunks: list[dict[str, Any]] = [{"choices": [choice(delta)]} for delta in deltas]
        chunks.append({"choices": [{"delta": {}, "finish_reason": finish}], **more})
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/v1/chat/completions", fulfill)
