"""Problems of a config.pbtxt are all reported, each with its line."""

from __future__ import annotations

from llmserve.serving.config.pbtxt import parse_config_text


def test_good_text() -> None:
    config, problems = parse_config_text('name: "m" max_batch_size: 4')
    assert problems == []
    assert (config.name, config.max_batch_size) == ("m", 4)


def test_every_unknown_field_is_reported_with_its_line() -> None:
    text = """name: "m"
max_batchsize: 4  # a comment with { and "
input [
  {
    name: "X"
    dtype: "}"
    dims: [ 1 ]
  }
]
extra { nested { a: "it's" } other: [1, 2] }
max_batch_size: 3
"""
    config, problems = parse_config_text(text)
    assert problems == [
        "line 2, column 1: ModelConfig has no field 'max_batchsize'",
        "line 6, column 5: ModelInput has no field 'dtype'",
        "line 10, column 1: ModelConfig has no field 'extra'",
    ]
    assert (config.max_batch_size, config.input[0].name, list(config.input[0].dims)) == (3, "X", [1])


def test_unknown_field_before_a_syntax_error() -> None:
    _, problems = parse_config_text("foo: 1\ninput {\n  dims: banana\n}\n")
    assert problems[0] == "line 1, column 1: ModelConfig has no field 'foo'"
    assert problems[1].startswith("line 3, column 9: ")
    assert len(problems) == 2


def test_unclosed_unknown_field_ends() -> None:
    _, problems = parse_config_text('foo { bar: "')
    assert problems[0] == "line 1, column 1: ModelConfig has no field 'foo'"


def test_wrong_value_names_the_line() -> None:
    _, problems = parse_config_text('name: "m"\nmax_batch_size: "four"\n')
    assert len(problems) == 1
    assert problems[0].startswith("line 2, column 17: ")


def test_unknown_enum_value() -> None:
    _, problems = parse_config_text("input {\n  data_type: TYPE_FLOAT\n}")
    assert problems[0].startswith("line 2, ")
    assert "TYPE_FLOAT" in problems[0]


def test_a_number_that_no_enum_has_is_a_problem() -> None:
    _, problems = parse_config_text('input { name: "X" data_type: 999999999999999999999999999999 }')
    assert problems == ["Value out of range: 999999999999999999999999999999"]
