"""Chat templates that take hours or gigabytes are ended, and cost those who wait for them nothing but that wait."""

from __future__ import annotations

import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmserve.errors import CheckpointError, InvalidArgument
from llmserve.stages.chat_template import MAX_SOURCE_BYTES, ChatTemplate
from llmserve.stages.preprocess import Preprocessor
from tests.chat_templates import TEMPLATES, write_talker

ASKED = [{"role": "user", "content": "x"}]
LOOPS = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
MEMORY, TIME, DEPTH = "512 MiB of memory", "2 s of processor time", "recursion"
ATTACKS = {
    "loops": (LOOPS, TIME),
    "a tree that is written": (
        "{% set ns = namespace(v=[1]) %}{% for i in range(99) %}{% set ns.v = [ns.v, ns.v] %}{% endfor %}{{ ns.v }}",
        TIME,
    ),
    "a constant with a width": ("{{ '%999999999d' % 1 }}", MEMORY),
    "a width": ("{{ '%999999999d' % messages|length }}", MEMORY),
    "a width in braces": ("{{ '{:>999999999}'.format(messages|length) }}", MEMORY),
    "a width of a filter": ("{{ messages[0].content|center(999999999) }}", MEMORY),
    "a product": ("{{ messages[0].content * 10 ** 9 }}", MEMORY),
    "a method": ("{{ messages[0].content.zfill(10 ** 9) }}", MEMORY),
    "a text that doubles": (
        "{% set ns = namespace(v='x') %}{% for i in range(64) %}{% set ns.v = ns.v ~ ns.v %}{% endfor %}", MEMORY,
    ),
    "a block that doubles": (
        "{% set ns = namespace(v='x') %}{% for i in range(64) %}{% set w %}{{ ns.v }}{{ ns.v }}{% endset %}"
        "{% set ns.v = w %}{% endfor %}", MEMORY,
    ),
    "a list": ("{{ (range(100000)|list * 100000)|length }}", MEMORY),
    "macros": ("{% macro a() %}{{ a() }}{{ a() }}{% endmacro %}{{ a() }}", DEPTH),
    "a text": ("{{ messages[0].content * (20 * 1024 * 1024) }}", "20971520 characters, more than 16777216"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_what_takes_too_much_is_ended(name: str) -> None:
    """Whoever waits has no work with it, and the next one is answered."""
    source, words = ATTACKS[name]
    template = ChatTemplate("{% if attacks %}" + source + "{% else %}{{ messages[0].content }}{% endif %}", {})
    began = time.thread_time()
    with pytest.raises(InvalidArgument, match=words):
        template.render(ASKED, {"attacks": True})
    assert time.thread_time() - began < 0.05
    assert template.render(ASKED) == "x"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ [" + "'x' * 10 ** 7, " * 100 + "] }}", f"{MEMORY}|{TIME}"),  # pages of a busy machine can take seconds
        ("{{ " + "[" * 100_000 + "]" * 100_000 + " }}", DEPTH),
        ("x" * (MAX_SOURCE_BYTES + 1), "1048577 bytes, more than 1048576"),
    ],
)
def test_what_cannot_be_compiled_within_the_limits_is_not_loaded(source: str, words: str) -> None:
    """Constants are computed when a template is compiled."""
    with pytest.raises(CheckpointError, match=words):
        ChatTemplate(source, {})


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_conversation_of_8000_messages_is_within_the_limits(kind: str) -> None:
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": f"number {number} " * 10} for number in range(8001)]
    assert "number 8000" in ChatTemplate(TEMPLATES[kind], {}).render(messages)


def test_a_template_never_runs_on_the_event_loop(tmp_path: Path) -> None:
    write_talker(tmp_path, "qwen", 420)
    assert not Preprocessor.open(tmp_path).is_brief


def test_the_process_is_started_again_and_ends_with_its_template() -> None:
    before = set(psutil.Process().children())
    template = ChatTemplate("{{ messages[0].content }}", {})
    (first,) = set(psutil.Process().children()) - before
    os.kill(first.pid, signal.SIGKILL)
    psutil.wait_procs([first], timeout=30)
    assert template.render(ASKED) == "x"
    (second,) = set(psutil.Process().children()) - before
    del template
    gc.collect()
    assert not second.is_running()


ARGUMENTS = {
    "": {"a": "é", "b": [1, None, 2.5]},
    "ensure_ascii=True": "é",
    "ensure_ascii=False": {"a": "<é>"},
    "indent=4": {"a": [1]},
    "indent=none, separators=(',', ':')": {"a": [1, 2]},
    "separators=(', ', ': '), sort_keys=true": {"b": 1, "a": 2},
    "ensure_ascii=False, indent=2, separators=(',', ':'), sort_keys=True": {"b": ["é"], "a": 2},
    "true, 2": {"a": "é"},
}


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_tojson_takes_what_transformers_does(arguments: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = "{{ messages[0].value | tojson" + (f"({arguments})" if arguments else "") + " }}"
    messages: list[dict[str, Any]] = [{"role": "user", "value": ARGUMENTS[arguments]}]
    expected = render_jinja_template([messages], chat_template=source)[0][0]
    assert ChatTemplate(source, {}).render(messages) == expected
