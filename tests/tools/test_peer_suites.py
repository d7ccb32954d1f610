"""How flags of llama-server are translated for its own tests, and what their failures are taken for."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from tools.peer_suites.__main__ import ITS_OWN, Case, case_of, table
from tools.peer_suites.llama_server import translate

STARTED = ["--port", "8080", "--temp", "0.8", "--host", "127.0.0.1", "--offline", "--no-slots", "--no-jinja"]
TRANSLATED = ["--any-model-name", "--http-port", "8080", "--host", "127.0.0.1"]


def test_flags_are_translated_or_lacked() -> None:
    assert translate(STARTED) == (TRANSLATED, "")
    flags, key = translate([*STARTED, "--alias", "tiny", "--api-key", "secret"])
    assert (flags, key) == ([*TRANSLATED, "--served-model-name", "tiny"], "secret")
    for lacked, said in {
        "--slots": "GET /slots",
        "--alias a,b": "several aliases of a model",
        "--new 1": "--new",
    }.items():
        with pytest.raises(SystemExit, match=f"llmserve lacks: {said}"):
            translate([*STARTED, *lacked.split()])


def test_before_the_first_case_anything_starts() -> None:
    fetched = [each for each in STARTED if each != "--offline"]
    assert translate([*fetched, "--embedding", "--new", "1"]) == (TRANSLATED, "")


@pytest.mark.parametrize(
    ("problem", "printed", "result"),
    [
        ("> server.start()\nE RuntimeError: died", "llmserve lacks: images", ("lacks", "images")),
        ('  make_request("GET", "/props")\n> assert a == 200\nE assert 404 == 200', "", ("lacks", "route /props")),
        (
            "> assert a == 200\nE assert 400 == 200",
            '"message": "field \\"n_probs\\" is unknown"',
            ("lacks", 'refused: field \\"n_probs\\" is unknown'),
        ),
        ("> assert match_regex(x, content)\nE assert False", "", ("lacks", ITS_OWN)),
        ("> assert a == b\nE assert 1 == 2", "", ("failed", "assert 1 == 2")),
    ],
)
def test_a_failure_has_a_reason(problem: str, printed: str, result: tuple[str, str]) -> None:
    element = ElementTree.Element("testcase", classname="unit.test_basic", name="test_a")
    ElementTree.SubElement(element, "failure").text = problem
    ElementTree.SubElement(element, "system-out").text = printed
    case = case_of(element)
    assert case == Case("test_basic.py", "test_a", *result)
    assert table([case]).splitlines()[-1] == f"test_basic.py: 1 {result[0]}: {result[1]}"


def test_a_case_that_passes() -> None:
    element = ElementTree.Element("testcase", classname="unit.test_basic", name="test_a")
    assert case_of(element) == Case("test_basic.py", "test_a", "passed")
    assert table([case_of(element)]).startswith("1 cases: 1 passed, 0 failed, 0 lacks")
