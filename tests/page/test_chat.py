"""Conversations on the page: answers as they come, again, in other words, stopped, refused and lost."""

from __future__ import annotations

import json
import re
import signal
import socket
from pathlib import Path

import jsonschema
import pytest
from playwright.sync_api import Browser, Error, Page, Route, expect

from tests.e2e.conftest import ServerProcess, start_server
from tests.e2e.test_streaming import num_cancelled, used_blocks, wait_for_idle
from tests.page.browsers import opened
from tests.page.conftest import KV_TOKENS
from tests.page.steps import (
    ANSWER,
    ENDLESS,
    LONG,
    QUESTION,
    answer_with,
    ask,
    body_text,
    contents,
    last_answer,
    posted,
    set_fields,
    settled,
)  # fmt: skip

GREEDY = "0"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer", "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
INJECTED = """# Title

Some **bold**, *slanted* and `code <b>` words, <img src=x onerror="window.hurt = 1"> and [a link](https://example.com/a).
[No link](javascript:window.hurt=1) ![image](https://example.com/x.png)

- one
  - inside
- two

3. three

> said

| a | b |
|---|---|
| 1 | <script>window.hurt = 1</script> |

```python
print("<b>")
```
"""


def test_an_answer_comes_and_is_measured(page: Page) -> None:
    expect(page.locator("#model")).to_have_value("ensemble")
    expect(page.locator("#health")).to_contain_text("ready")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    set_fields(page, temperature=GREEDY)
    # All pieces may be read at the same time of the browser's clock, and then there is no speed.
    page.evaluate("() => { const now = performance.now(); let calls = 0; performance.now = () => now + ++calls; }")
    answer = settled(ask(page))
    assert body_text(answer) == ANSWER
    numbers = answer.locator(".numbers").inner_text()
    wanted = r"^\d tokens\s.*tokens/s\s*first token after \d.*in the prompt.*complete$"
    assert re.search(wanted, numbers, re.DOTALL), numbers
    expect(page.locator("#announcer")).to_have_text("The answer is complete.")
    expect(page.locator("#welcome")).to_be_hidden()


def test_ready_is_said_when_a_message_can_be_sent(browser: Browser, server: ServerProcess) -> None:
    held: list[Route] = []
    with opened(browser, "about:blank") as page:
        page.route("**/v1/models", lambda route: held.append(route))
        with page.expect_request("**/v1/models"):
            page.goto(server.http)
        expect(page.locator("#health")).to_have_text("loading models")
        message = page.get_by_label("Message", exact=True)
        message.fill(QUESTION)
        message.press("Enter")
        expect(page.locator("#held")).to_have_text("Will be sent when the server is ready")
        message.press("Space")  # still being written
        expect(page.locator("#held")).to_be_empty()
        message.press("Enter")
        expect(message).to_have_value(QUESTION + " ")
        expect(page.locator(".message")).to_have_count(0)
        held[0].continue_()
        expect(page.locator("#health")).to_have_text("ready")
        settled(last_answer(page))
        expect(page.locator(".message.user")).to_have_text(QUESTION)
        expect(page.locator("#held")).to_be_empty()


def test_a_server_without_a_model_is_not_ready(page: Page) -> None:
    page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": []}))
    page.reload()
    expect(page.locator("#health")).to_have_text("no model")
    expect(page.locator("#send")).to_be_disabled()
    page.unroute("**/v1/models")
    expect(page.locator("#health")).to_have_text("ready")
    expect(page.locator("#send")).to_be_enabled()


def test_answers_have_a_limit_by_default(page: Page, server: ServerProcess) -> None:
    body = {"model": "ensemble", "messages": [{"role": "user", "content": "x"}], "max_tokens": 30_000, "temperature": 0}
    asked = page.request.post(f"{server.http}/v1/chat/completions", data={**body, "nonsense": 1})
    words = asked.json()["warning"]
    assert "max_tokens is 30000, " in words
    answer_with(page, [{"content": "a"}], warning=words.replace("30000", "2048"))
    with page.expect_request("**/v1/chat/completions") as default:
        notice = settled(ask(page)).get_by_role("alert")
    assert posted(default.value)["max_tokens"] == 2048
    expect(notice).to_contain_text("nonsense")
    expect(notice).not_to_contain_text("max_tokens")


def test_drafted_tokens_are_told(page: Page) -> None:
    details = {"accepted_prediction_tokens": 12, "rejected_prediction_tokens": 8}
    usage = {"prompt_tokens": 5, "completion_tokens": 20, "total_tokens": 25, "completion_tokens_details": details}
    answer_with(page, [{"content": "text"}], usage=usage)
    expect(settled(ask(page)).locator(".numbers")).to_contain_text("12 of 20 drafted tokens accepted")


def test_the_conversation_goes_along_and_can_be_begun_anew(page: Page) -> None:
    set_fields(page, temperature=GREEDY, system="You summarize.")
    first = body_text(settled(ask(page)))
    with page.expect_request("**/v1/chat/completions") as asked:
        settled(ask(page, "Summarize: Opens the file."))
    messages = posted(asked.value)["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert [message["content"] for message in messages[:3]] == ["You summarize.", QUESTION, first]
    page.reload()
    assert body_text(page.locator(".message.assistant").first) == first
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".message")).to_have_count(0)
    expect(page.locator("#welcome")).to_be_visible()


def test_an_answer_can_be_had_again_and_a_question_changed(page: Page) -> None:
    set_fields(page, temperature=GREEDY)
    settled(ask(page))
    with page.expect_request("**/v1/chat/completions") as asked:
        page.get_by_role("button", name="Regenerate").click()
    assert [message["content"] for message in posted(asked.value)["messages"]] == [QUESTION]
    assert body_text(settled(last_answer(page))) == ANSWER
    page.get_by_role("button", name="Edit").click()
    box = page.get_by_role("textbox", name="Edit")
    box.press("Escape")
    expect(page.locator(".message.user")).to_contain_text(QUESTION)
    page.get_by_label("Message", exact=True).press("ArrowUp")
    box.fill("Summarize: Opens the file and returns its lines as a list of strings.")
    box.press("Enter")
    expect(page.locator(".message")).to_have_count(2)
    assert body_text(settled(last_answer(page))) == "Return the lines of the file."


def test_a_stopped_answer_frees_its_sequence(page: Page, server: ServerProcess) -> None:
    for stop in ("button", "key"):
        wait_for_idle(server)
        before = num_cancelled(server)
        set_fields(page, format="regex", regex=ENDLESS)
        answer = ask(page)
        expect(answer.locator(".body")).to_contain_text("word word")
        assert used_blocks(server) > 0
        if stop == "button":
            page.get_by_role("button", name="Stop").click()
        else:
            page.keyboard.press("Escape")
        settled(answer)
        assert "stopped" in answer.locator(".numbers").inner_text()
        wait_for_idle(server)
        assert num_cancelled(server) == before + 1
    page.get_by_role("button", name="New conversation").click()
    set_fields(page, format="text", temperature=GREEDY)
    assert body_text(settled(ask(page))) == ANSWER


def test_a_server_that_goes_away_is_told_and_tried_again(browser: Browser, engine: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    first = start_server(str(engine), *KV_TOKENS, "--http-port", port)
    with opened(browser, first.http, expected=["ERR_", "400"]) as page:
        set_fields(page, format="regex", regex=ENDLESS)
        answer = ask(page)
        expect(answer.locator(".body")).to_contain_text("word word")
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
        notice = answer.get_by_role("alert")
        expect(notice).to_contain_text("The connection to the server was lost. The answer so far is kept.")
        assert "word word" in body_text(answer)
        expect(page.locator("#health")).to_have_text("unreachable")
        notice.get_by_role("button", name="Try again").click()
        expect(last_answer(page).get_by_role("alert")).to_contain_text("Cannot reach the server.")
        second = start_server(str(engine), *KV_TOKENS, "--http-port", port)
        expect(page.locator("#health")).to_have_text("ready")
        set_fields(page, format="text", temperature=GREEDY)
        page.get_by_role("button", name="Try again").click()
        assert body_text(settled(last_answer(page))) == ANSWER
        expect(page.locator(".message")).to_have_count(2)
    second.process.send_signal(signal.SIGTERM)
    assert second.process.wait(timeout=60) == 0


def test_every_setting_is_asked_for(page: Page) -> None:
    set_fields(
        page, system="Be brief.", temperature="0.5", max_tokens="7", top_p="0.9", top_k="40", min_p="0.05", seed="11",
        presence_penalty="0.1", frequency_penalty="0.2", repetition_penalty="1.1", stop="one\ntwo\\nlines",
    )  # fmt: skip
    page.get_by_label("Token probabilities").check()
    with page.expect_request("**/v1/chat/completions") as asked:
        answer = settled(ask(page, "x"))
    expect(answer.get_by_role("alert")).to_be_hidden()
    assert posted(asked.value) == {
        "model": "ensemble", "stream": True, "stream_options": {"include_usage": True},
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}],
        "temperature": 0.5, "max_tokens": 7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 11,
        "presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1, "stop": ["one", "two\nlines"],
        "logprobs": True, "top_logprobs": 5,
    }  # fmt: skip
    page.reload()
    expect(page.locator("[name=top_k]")).to_have_value("40")
    set_fields(page)
    page.get_by_role("button", name="Reset").click()
    with page.expect_request("**/v1/chat/completions") as asked:
        answer = ask(page, "y")
    page.keyboard.press("Escape")
    settled(answer)
    assert posted(asked.value).keys() == {"model", "stream", "stream_options", "messages", "max_tokens"}


def test_answers_keep_to_their_form(page: Page) -> None:
    set_fields(page, format="json_schema", schema=json.dumps(SCHEMA))
    expect(page.locator("#format-badge")).to_have_text("JSON that matches a schema")
    jsonschema.validate(json.loads(body_text(settled(ask(page)))), SCHEMA)
    set_fields(page, format="json_object", max_tokens="60")
    with page.expect_request("**/v1/chat/completions") as asked:
        settled(ask(page))
    assert posted(asked.value)["response_format"] == {"type": "json_object"}
    set_fields(page, format="regex", regex="(yes|no), [0-9]{3}", max_tokens="")
    assert re.fullmatch("(yes|no), [0-9]{3}", body_text(settled(ask(page))))


def test_what_cannot_be_sent_is_not(page: Page) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    set_fields(page, format="json_schema", schema='{"type": ')
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_label("Message", exact=True).fill("x")
    page.keyboard.press("Enter")
    expect(page.locator("#settings [name=schema]")).to_be_focused()
    set_fields(page, format="text", temperature="7")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#settings [name=temperature]")).to_be_focused()
    expect(page.get_by_label("Message", exact=True)).to_have_value("x")
    expect(page.locator(".message")).to_have_count(0)
    assert not any("chat/completions" in url for url in asked)


def test_a_refusal_is_in_the_servers_words(browser: Browser, server: ServerProcess) -> None:
    with opened(browser, server.http, expected=["400"]) as page:
        set_fields(page, format="regex", regex="(")
        notice = settled(ask(page)).get_by_role("alert")
        expect(notice).to_contain_text("The server rejected the request:")
        expect(notice).to_contain_text("regex")
        set_fields(page, format="text", temperature=GREEDY)
        notice.get_by_role("button", name="Try again").click()
        assert body_text(settled(last_answer(page))) == ANSWER


def test_text_stays_text(page: Page) -> None:
    answer_with(page, contents([INJECTED[at : at + 5] for at in range(0, len(INJECTED), 5)]))
    body = settled(ask(page)).locator(".body")
    assert page.evaluate("window.hurt") is None
    assert body.locator("img, script, b").count() == 0
    assert '<img src=x onerror="window.hurt = 1">' in body.inner_text()
    for selector, text in {
        "h3": "Title", "strong": "bold", "em": "slanted", "p code": "code <b>", "ul ul li": "inside",
        "pre code": 'print("<b>")', "blockquote": "said", "th >> nth=0": "a",
        "td >> nth=1": "<script>window.hurt = 1</script>",
    }.items():  # fmt: skip
        assert body.locator(selector).inner_text().strip() == text
    assert body.locator("ol").get_attribute("start") == "3"
    links = body.locator("a")
    assert [link.get_attribute("href") for link in links.all()] == [
        "https://example.com/a",
        "https://example.com/x.png",
    ]


def test_thoughts_are_told_apart_and_stay_here(page: Page) -> None:
    answer_with(page, [{"reasoning_content": "Let me "}, {"reasoning_content": "see."}, *contents(["Paris."])])
    answer = settled(ask(page))
    assert body_text(answer) == "Paris."
    answer.get_by_text("Thoughts").click()
    expect(answer.locator(".thoughts")).to_contain_text("Let me see.")
    with page.expect_request("**/v1/chat/completions") as asked:
        settled(ask(page, "And Spain?"))
    assert posted(asked.value)["messages"][1] == {"role": "assistant", "content": "Paris."}


def test_the_browser_refuses_markup_and_other_hosts(browser: Browser, server: ServerProcess) -> None:
    """Whatever a mistake in the page's own code might let through."""
    with opened(browser, server.http, expected=["TrustedHTML", "Content Security Policy"]) as page:
        with pytest.raises(Error, match="TrustedHTML"):
            page.evaluate("document.body.innerHTML = '<b>x</b>'")
        with pytest.raises(Error, match="fetch"):
            page.evaluate("fetch('http://127.0.0.1:9/')")


def test_thousands_of_pieces_are_drawn_in_few_frames(page: Page) -> None:
    count = 4000
    answer_with(page, contents([f"word{number} " for number in range(count)]))
    page.evaluate(
        """() => {
          window.changes = 0;
          new MutationObserver(() => window.changes += 1).observe(
            document.getElementById("log"), {subtree: true, childList: true});
        }"""
    )
    answer = settled(ask(page))
    assert body_text(answer).strip().endswith(f"word{count - 1}")
    assert page.evaluate("window.changes") < count / 10


def test_long_answers_are_followed_unless_somebody_reads(page: Page) -> None:
    answer_with(page, contents([f"{number}\n\n" for number in range(200)]))
    settled(ask(page))
    at_end = (
        "() => { const s = document.getElementById('scroller'); return s.scrollHeight - s.scrollTop - s.clientHeight; }"
    )
    assert page.evaluate(at_end) < 3
    page.unroute("**/v1/chat/completions")
    set_fields(page, format="regex", regex=LONG)
    answer = ask(page)
    expect(answer.locator(".body")).not_to_be_empty()
    page.locator("#scroller").evaluate("s => s.scrollTop = 0")
    settled(answer)
    assert page.locator("#scroller").evaluate("s => s.scrollTop") == 0
