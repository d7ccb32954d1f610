"""How flags of peers' servers are translated for their own tests, and what their failures are taken for."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools.peer_suites import llama_cpp, vllm, vllm_flags
from tools.peer_suites.cases import Case, table
from tools.peer_suites.llama_server import translate

STARTED = ["--port", "8080", "--temp", "0.8", "--host", "127.0.0.1", "--offline", "--no-slots", "--no-jinja"]
OF_ALL = ["--any-model-name", "--parameter", "preprocessing.template_dates=true"]
AT_THE_END = ["--cors-allow-origin", "*", "--cors-allow-credentials", "--default-sampling", '{"temperature": 0.8}']
TRANSLATED = [*OF_ALL, *AT_THE_END]


def test_flags_are_translated_or_lacked() -> None:
    assert translate(STARTED) == (TRANSLATED, "")
    flags, key = translate([*STARTED, "--alias", "tiny", "--api-key", "secret"])
    assert (flags, key) == ([*OF_ALL, "--served-model-name", "tiny", *AT_THE_END], "secret")
    for lacked, said in {
        "--slots": "GET /slots",
        "--alias a,b": "several aliases of a model",
        "--new 1": "--new",
    }.items():
        with pytest.raises(SystemExit, match=f"llmserve lacks: {said}"):
            translate([*STARTED, *lacked.split()])


def test_thoughts_are_a_value_of_templates() -> None:
    assert '{"enable_thinking": false}' in translate([*STARTED, "--reasoning", "off"])[0]


def test_chat_templates_are_files_or_names() -> None:
    for flags in (["--chat-template-file", "a.jinja"], ["--chat-template", "llama3"]):
        assert translate([*STARTED, *flags])[0] == [*OF_ALL, "--chat-template", flags[1], *AT_THE_END]
    flag, path = translate([*STARTED, "--chat-template", "This is a template"])[0][len(OF_ALL) : -len(AT_THE_END)]
    assert (flag, Path(path).read_text()) == ("--chat-template", "This is a template")
    Path(path).unlink()


def test_flags_of_vllm() -> None:
    flags = ["--dtype", "float32", "--enforce-eager", "--reasoning-parser", "qwen3", "--lora-modules", "a=b"]
    made = vllm_flags.translate("Qwen/Qwen3-8B", flags, Path("/t"))
    assert made == [
        "--any-model-name", "--served-model-name", "Qwen/Qwen3-8B", "--chat-template", "/t/Qwen-Qwen3-0.6B.jinja",
        "--parameter", "preprocessing.tool_format=none",
    ]  # fmt: skip
    same = ["--root-path", "/llm", "--enable-force-include-usage"]
    assert vllm_flags.translate("gpt2", same, Path("/t"))[-3:] == same
    with pytest.raises(RuntimeError, match="llmserve lacks: watermarks"):
        vllm_flags.translate("gpt2", ["--watermark-config", "{}"], Path("/t"))


def test_files_of_vllm_are_asked_or_not() -> None:
    assert not {Path(path).stem for path in vllm.ASKED} & {*vllm.NOT_ASKED}


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
        (
            "> assert match_regex(x, content)\nE assert False",
            "",
            ("cannot", "the text or the token counts of the suite's own network"),
        ),
        ("> assert a == b\nE assert 1 == 2", "", ("failed", "assert 1 == 2")),
    ],
)
def test_a_failure_has_a_reason(problem: str, printed: str, result: tuple[str, str]) -> None:
    element = ElementTree.Element("testcase", classname="unit.test_basic", name="test_a")
    ElementTree.SubElement(element, "failure").text = problem
    ElementTree.SubElement(element, "system-out").text = printed
    case = llama_cpp.RULES.case_of(element)
    assert case == Case("test_basic.py", "test_a", *result)
    assert f"test_basic.py: 1 {result[0]}: {result[1]}" in table([case])


def test_a_case_that_no_other_server_passes() -> None:
    element = ElementTree.Element("testcase", classname="unit.test_security", name="test_local_media_file[a]")
    ElementTree.SubElement(element, "failure").text = "> assert a == 200\nE assert 400 == 200"
    case = llama_cpp.RULES.case_of(element)
    assert case == Case("test_security.py", "test_local_media_file[a]", "cannot", "images")


def test_cases_that_pass_are_a_share_of_those_that_can() -> None:
    element = ElementTree.Element("testcase", classname="unit.test_basic", name="test_a")
    case = llama_cpp.RULES.case_of(element)
    assert case == Case("test_basic.py", "test_a", "passed")
    others = [Case("test_basic.py", "test_b", result, "x") for result in ("failed", "cannot")]
    assert table([case, *others]).splitlines()[-1] == (
        "3 cases: 1 passed, 1 failed, 0 lacks, 1 cannot; 50.0 % of 2 that can pass"
    )
