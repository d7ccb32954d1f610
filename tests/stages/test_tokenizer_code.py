"""Which code files a tokenizer of transformers needs, found without running any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmserve.stages import tokenizer_code
from llmserve.stages.tokenizer_code import TokenizerCode, find_tokenizer_code, missing_tokenizer_code


def write(folder: Path, auto_map: Any, **files: str) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
    for module, code in files.items():
        (folder / f"{module}.py").write_text(code)
    return folder


@pytest.mark.parametrize(
    "auto_map",
    [
        {"AutoTokenizer": ["tokenization_x.X", None]},
        {"AutoTokenizer": "tokenization_x.X", "AutoConfig": "configuration_x.Config"},
        ["tokenization_x.X", None],
    ],
)
def test_what_auto_map_names_for_the_tokenizer(tmp_path: Path, auto_map: Any) -> None:
    write(tmp_path, auto_map, tokenization_x="", configuration_x="", modeling_x="")
    assert find_tokenizer_code(tmp_path) == TokenizerCode(("tokenization_x.py",))


def test_slow_and_fast_and_what_they_import_of_their_folder(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"AutoTokenizer": ["slow.S", "fast.F"]},
        slow="import json\nfrom transformers import x\nif True:\n    from .shared import a\n",
        fast="from .slow import S\nfrom .deep import b",
        shared="from .shared import a",
        deep="",
        other="",
    )
    assert find_tokenizer_code(tmp_path) == TokenizerCode(("slow.py", "fast.py", "shared.py", "deep.py"))


@pytest.mark.parametrize("content", [None, "{}", '{"auto_map": {"AutoTokenizer": null}}', '{"auto_map": 3}'])
def test_most_tokenizers_have_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer_config.json").write_text(content)
    assert find_tokenizer_code(tmp_path) == TokenizerCode()
    assert missing_tokenizer_code(tmp_path) == ()


@pytest.mark.parametrize(
    ("named", "problem"),
    [
        ("../outside.X", "'../outside' is not the name of a file"),
        ("/etc/outside.X", "'/etc/outside' is not the name of a file"),
        ("folder/inside.X", "'folder/inside' is not the name of a file"),
        ("NoModule", "'' is not the name of a file"),
        ("someone/else--tokenization_x.X", "code of another repository"),
        ("missing.X", "missing.py is missing"),
    ],
)
def test_no_name_leads_out_of_the_folder(tmp_path: Path, named: str, problem: str) -> None:
    (tmp_path / "outside.py").write_text("")
    (tmp_path / "t" / "folder").mkdir(parents=True)
    (tmp_path / "t" / "folder" / "inside.py").write_text("")
    found = find_tokenizer_code(write(tmp_path / "t", {"AutoTokenizer": [named, None]}))
    assert found.files == ()
    assert problem in found.problems[0]


def test_imports_do_not_lead_out_of_it_either(tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text("")
    (tmp_path / "t").mkdir()
    found = find_tokenizer_code(write(tmp_path / "t", ["x.X", None], x="from ..outside import a\nfrom .gone import b"))
    assert found.files == ("x.py",)
    assert [text.split(" is ")[0] for text in found.problems] == ["'.outside'", "gone.py"]


def test_code_is_limited_in_size_and_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = {f"m{i}": f"from .m{i + 1} import a" for i in range(30)}
    found = find_tokenizer_code(write(tmp_path, ["m0.X", None], **chain))
    assert len(found.files) == tokenizer_code.MAX_FILES
    assert "m16.py exceeds the maximum of 16 files" in found.problems[0]
    monkeypatch.setattr(tokenizer_code, "MAX_BYTES", 30)
    found = find_tokenizer_code(tmp_path)
    assert found.files == ("m0.py",)
    assert "m1.py exceeds the maximum of 30 bytes" in found.problems[0]


def test_a_config_that_cannot_be_read_is_a_problem_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    assert "is not valid JSON" in find_tokenizer_code(tmp_path).problems[0]
    assert missing_tokenizer_code(tmp_path) == ()
