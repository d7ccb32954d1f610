"""What is in messages: formulas, code, files; and system prompts that have names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.page.steps import answer_with, ask, body_text, contents, last_answer, posted, set_fields, settled

FORMULAS = {
    r"$x^2$": "msup(mi mn)",
    r"\(x_{1,2}\)": "msub(mi mrow(mn mo mn))",
    r"$\frac{a}{2}$": "mfrac(mrow(mi) mrow(mn))",
    r"$$\sum_{i=1}^n i$$": "munderover(mo mrow(mi mo mn) mi) mi",
    r"\[\lim_{n \to \infty} n\]": "munder(mi mrow(mi mo mi)) mi",
    r"$\sqrt[3]{x}' \leq \hat y$": "msup(mroot(mrow(mi) mrow(mn)) mrow(mo)) mo mover(mi mo)",
    "$$\\begin{pmatrix} 1 & 0 \\\\\n0 & \\alpha \\end{pmatrix}$$": (
        "mrow(mo mtable(mtr(mtd(mrow(mn)) mtd(mrow(mn))) mtr(mtd(mrow(mn)) mtd(mrow(mi)))) mo)"
    ),
    r"$\left( \frac12 \right]\ \text{if a}$": "mrow(mo mrow(mfrac(mn mn)) mo) mspace mtext",
}
LEFT = (
    "It costs $5 and $10.",
    r"$\unknown{x}$",
    r"$\frac{a}$",
    r"$\sqrt[3$",
    r"$\left( x$",
    r"$a } b$",
    "$" + "{" * 60 + "}" * 60 + "$",
    r"$\href{javascript:window.hurt=1}{x}$",
    r"\(x",
)
TREE = (
    "math => { const tree = e => e.localName"
    " + (e.children.length ? '(' + [...e.children].map(tree).join(' ') + ')' : '');"
    " return [...math.firstElementChild.children].map(tree).join(' '); }"
)
CODE = """```python
# it's
def f(x): return "a # b" + str(1.5)
```

```sql
select 1 -- one
```

```
def plain
```

```js
const a = `${b} // c`; // d
```"""
PARTS = {
    "comment": ["# it's", "-- one", "// d"],
    "string": ['"a # b"', "`${b} // c`"],
    "number": ["1.5", "1"],
    "word": ["def", "return", "select", "const"],
}
FILE: Mapping[str, Any] = {"name": "notes.md", "mimeType": "text/markdown", "buffer": b"Close the ```connection```."}


def attach(page: Page, *files: Mapping[str, Any]) -> None:
    page.locator("#file").set_input_files(files)  # type: ignore[arg-type]


def test_formulas_are_drawn(page: Page) -> None:
    answer_with(page, contents("\n\n".join(FORMULAS)))
    math = settled(ask(page)).locator("math")
    assert [each.evaluate(TREE) for each in math.all()] == list(FORMULAS.values())


def test_what_is_no_formula_stays_as_it_was_written(page: Page) -> None:
    answer_with(page, contents("\n\n".join(LEFT)))
    answer = settled(ask(page))
    expect(answer.locator("math")).to_have_count(0)
    assert body_text(answer).split("\n\n") == list(LEFT)


def test_code_is_coloured_and_stays_what_it_is(page: Page) -> None:
    answer_with(page, contents(CODE))
    answer = settled(ask(page))
    for kind, parts in PARTS.items():
        assert answer.locator(f".c-{kind}").all_inner_texts() == parts
    assert answer.locator("pre").nth(0).inner_text() == '# it\'s\ndef f(x): return "a # b" + str(1.5)'
    colours = {kind: answer.locator(f".c-{kind}").first.evaluate("e => getComputedStyle(e).color") for kind in PARTS}
    assert len(set(colours.values())) == len(PARTS)


def test_text_files_go_along(page: Page) -> None:
    attach(page, FILE, {"name": "b.txt", "mimeType": "text/plain", "buffer": b"second"})
    page.get_by_role("button", name="b.txt").click()  # not that one
    page.get_by_label("Message", exact=True).fill("Summarize")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.keyboard.press("Enter")
    assert posted(asked.value)["messages"][-1]["content"] == (
        "notes.md\n````\nClose the ```connection```.\n````\n\nSummarize"
    )
    page.keyboard.press("Escape")
    expect(page.locator("#files")).to_be_empty()
    shown = page.locator(".message.user .file")
    shown.locator("summary").click()
    expect(shown.locator("pre")).to_have_text("Close the ```connection```.")
    page.reload()
    page.locator(".message.user").get_by_role("button", name="Edit").click()
    page.get_by_role("textbox", name="Edit").fill("Again")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.keyboard.press("Enter")
    assert posted(asked.value)["messages"][-1]["content"].startswith("notes.md\n````\n")
    page.keyboard.press("Escape")
    settled(last_answer(page))


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a\x00b", b"a" * 500_001], ids=["not UTF-8", "binary", "large"])
def test_other_files_are_refused(page: Page, content: bytes) -> None:
    attach(page, {"name": "other", "mimeType": "text/plain", "buffer": content})
    expect(page.locator("#files")).to_contain_text("other is not attached")
    attach(page, FILE)
    expect(page.locator("#files")).to_have_text("notes.md ×")


def test_system_prompts_have_names(page: Page) -> None:
    set_fields(page, system="You summarize.", temperature="0")
    page.get_by_role("button", name="Save as…").click()
    page.keyboard.type("Short <b>")
    page.keyboard.press("Enter")
    choice = page.get_by_label("Saved system prompts")
    expect(choice).to_have_value("Short <b>")
    set_fields(page, system="Another.")
    expect(choice).to_have_value("")
    page.reload()
    set_fields(page)
    choice.select_option("Short <b>")
    with page.expect_request("**/v1/chat/completions") as asked:
        settled(ask(page))
    assert posted(asked.value)["messages"][0] == {"role": "system", "content": "You summarize."}
    page.locator("#prompt-delete").click()
    page.get_by_role("button", name="OK").click()
    expect(page.locator("[name=system]")).to_have_value("")
    assert choice.locator("option").all_inner_texts() == ["none"]
