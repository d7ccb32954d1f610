from __future__ import annotations

from typing import Any

import pytest

from llmserve.strict_yaml import read_yaml


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("a: 1\nb: {a: 2, c: [x]}\n", {"a": 1, "b": {"a": 2, "c": ["x"]}}),
        ("base: &b {a: 1}\nother: {<<: *b, a: 2}\n", {"base": {"a": 1}, "other": {"a": 2}}),  # that is what << is for
        ("1: a\n'1': b\n", {1: "a", "1": "b"}),
        ("", None),
    ],
)
def test_yaml_is_read(content: str, found: Any) -> None:
    assert read_yaml(content) == read_yaml(content.encode()) == found


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("margins: {rougeL: 1, rougeL: 50}", "duplicate key 'rougeL'"),
        ('a: 1\nb: 2\n"a": 3', "duplicate key 'a'"),
        ("a: [1", "expected"),
        ("a: 2024-99-99", "month must be in 1..12"),
        ("a: !!int x", "invalid literal"),
        ("[" * 5_000, "nested too deeply"),
        ("[1]: 2", "unhashable key"),
        (b"\xff\xfe\xff", "truncated data"),
    ],
)
def test_whatever_is_wrong_is_a_value_error(content: str | bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_yaml(content)
