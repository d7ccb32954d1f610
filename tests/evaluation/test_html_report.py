from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from llmserve.errors import InvalidArgument
from llmserve.evaluation.answers import Answer, Performance, Sample
from llmserve.evaluation.judging.gate import judge
from llmserve.evaluation.reporting.html_report import render_html, save_html
from llmserve.evaluation.reporting.report import Side
from llmserve.evaluation.run import compare
from llmserve.evaluation.suite import load_suite
from tests.evaluation.suites import ROWS, write_choice_suite
from tests.evaluation.test_report import DAMAGED, FACTS, GOOD, SAMPLES, report

VOID = {"meta"}


class _Page(HTMLParser):
    """What a page is made of; nothing may be left open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def page(text: str) -> _Page:
    made = _Page(text)
    assert made.open == []
    return made


def test_a_page_says_what_the_table_says(tmp_path: Path) -> None:
    made = page(render_html(report(tmp_path, [*GOOD[:-2], *DAMAGED[:2]], loss_margins={"float": {"kl": 0.5}})))
    assert "may not be released" in made.text
    for words in (
        "ROUGE-1",
        "ROUGE-Lsum",
        "KL, nat",
        "inconclusive",
        "tokens/s",
        "30 of 32 answers are equal",
        "-6.25",
    ):
        assert words in made.text, words
    intervals, histograms = 4 + 5, 2
    assert made.count("svg") == intervals + histograms
    assert sum(attrs.get("class") == "zone" for _, attrs in made.tags) == 2  # those with a margin
    assert sum(attrs.get("class") == "sample" for _, attrs in made.tags) == 2  # answers that differ


def test_the_loss_that_could_be_seen_is_in_the_table(tmp_path: Path) -> None:
    made = render_html(report(tmp_path, [*GOOD[:-2], *DAMAGED[:2]]))
    told = report(tmp_path, [*GOOD[:-2], *DAMAGED[:2]]).gate
    assert told.metrics[0].detectable > 1.0
    detectable: list[float | None] = [*(m.detectable for m in told.metrics), *(each.detectable for each in told.losses)]
    for loss in detectable:
        shown = "" if loss is None else f"{loss:.2g}"
        assert f"<td>{shown}</td><td class" in made
    assert "with a probability of 80 %" in made
    assert "Right on one side only" not in made


def test_questions_that_only_one_side_has_right_are_named(tmp_path: Path) -> None:
    wrong = DAMAGED[0]
    changes = {"metrics": ["exact_match"], "margins": {"exact_match": 5.0}}
    lost = report(tmp_path, [wrong, *GOOD[1:-1], wrong], **changes)
    theirs, ours = lost.scores
    gate = judge(ours, theirs, margins={"exact_match": 5.0}, floors={})
    gained = replace(lost, baseline=lost.engine, engine=lost.baseline, scores=(ours, theirs), gate=gate)
    assert '<summary>lost: 2</summary><p class="text">row-0, row-31</p>' in render_html(lost)
    assert "exact: right answers lost 2, gained 0" in page(render_html(lost)).text
    assert "gained: " not in page(render_html(lost)).text
    assert "exact: right answers lost 0, gained 2" in page(render_html(gained)).text
    assert '<summary>gained: 2</summary><p class="text">row-0, row-31</p>' in render_html(gained)


def test_a_page_of_choices_names_flips_in_both_directions(tmp_path: Path) -> None:
    """2 are lost and 5 gained: p = 2 (1 + 7 + 21) / 2^7. By length these were wrong before, and still are."""
    suite = load_suite(write_choice_suite(tmp_path))
    choices = ("the red fox", "the red dog runs")
    samples = [Sample(row["id"], "Which one?", choices[0], choices) for row in ROWS]
    right = Answer(choices[0], 9, 8, 0.5, log_likelihoods=(-1.0, -1.2))  # but not by length
    wrong = Answer(choices[1], 9, 8, 0.5, log_likelihoods=(-5.0, -4.75))
    sure = Answer(choices[0], 9, 8, 0.5, log_likelihoods=(-1.0, -9.0))  # right by length, too
    sides = [
        Side(FACTS, answers, Performance.of(answers, 2.0))
        for answers in (
            [right, right, *[wrong] * 5, *[sure] * 25],
            [wrong, wrong, *[right] * 5, *[sure] * 24, replace(sure, log_likelihoods=(-1.0, -8.0))],
        )
    ]
    text = render_html(compare(suite, "d" * 64, samples, sides[0], sides[1], "choices are weighed"))
    made = page(text)
    assert "acc: right answers lost 2, gained 5 (McNemar's p 0.45)" in made.text
    assert made.text.count("right answers lost 0, gained 0 (McNemar's p 1)") == 2  # by characters and by bytes
    assert text.count("<summary>lost") == text.count("<summary>gained") == 1
    assert '<summary>lost: 2</summary><p class="text">row-0, row-1</p>' in text
    assert '<summary>gained: 5</summary><p class="text">row-2, row-3, row-4, row-5, row-6</p>' in text
    assert "25 of 32 answers are equal" in made.text
    assert "KL" not in made.text  # nothing was written that could be read token by token
    shown = [attrs for _, attrs in made.tags if attrs.get("class") == "sample"]
    assert len(shown) == 7
    assert text.count('<div class="text">the red fox</div>') == 7 + 7  # a side's, and the expected one
    assert text.count('<div class="text">the red dog runs</div>') == 7
    assert made.count("del") == made.count("ins") == 0  # a choice is taken as a whole


def test_what_moved_is_marked_word_by_word(tmp_path: Path) -> None:
    other = replace(GOOD[0], text=GOOD[0].text.replace("The ", "A "))
    made = render_html(report(tmp_path, [other, *GOOD[1:]]))
    assert f"<del>The</del>{GOOD[0].text[3:]}" in made
    assert f"<ins>A</ins>{GOOD[0].text[3:]}" in made
    assert SAMPLES[0].reference in made


def test_equal_engines_have_a_page_too(tmp_path: Path) -> None:
    made = page(render_html(report(tmp_path, GOOD)))
    assert "may be released" in made.text
    assert "every answer is equal" in made.text


def test_nothing_that_a_model_says_becomes_markup_and_nothing_is_fetched(tmp_path: Path) -> None:
    evil = replace(GOOD[0], text='<script>alert("x")</script><img src=http://example.com> {{ 7 * 7 }}')
    long = replace(GOOD[1], text="<b>" * 2000)
    text = render_html(report(tmp_path, [evil, long, *GOOD[2:]]))
    made = page(text)
    assert made.count("script") == made.count("img") == made.count("b") == made.count("link") == 0
    assert '<script>alert("x")' in made.text
    assert "{{ 7 * 7 }}" in made.text
    assert not [attrs for _, attrs in made.tags if {"src", "href"} & attrs.keys()]


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match="the report cannot be written"):
        save_html(report(tmp_path / "suite", GOOD), tmp_path / "file" / "r.html")
