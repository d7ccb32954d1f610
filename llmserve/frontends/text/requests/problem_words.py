"""Describes a body's problems in the words of this API instead of the library's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

WORDS = {  # by pydantic's type of a problem; the problem's context fills the braces
    "missing": "is missing",
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "none_required": "must be null",
    "finite_number": "must be finite",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must have {min_length} or more characters",
    "string_too_long": "may have at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
    "too_short": "must have {min_length} or more entries",
    "too_long": "may have at most {max_length} entries",
    "literal_error": "must be {expected}",
    "union_tag_invalid": "{discriminator} must be one of {expected_tags}, got '{tag}'",
    "union_tag_not_found": "{discriminator} is missing",
}
OWN_WORDS = "Value error, "  # pydantic's prefix of the messages of our validators
NAME = re.compile(r"\w[\w.-]*")
TYPES = frozenset(("str", "int", "float", "bool"))  # pydantic puts the members of a union among the names


def place_of(parts: Sequence[int | str]) -> str:
    """The place of a problem: names and indexes, without the library's own parts."""
    return ".".join(
        str(part) for part in parts if isinstance(part, int) or (NAME.fullmatch(part) and part not in TYPES)
    )


def problem_of(kind: str, text: str, context: Mapping[str, Any]) -> str:
    words = WORDS.get(kind)
    return text.removeprefix(OWN_WORDS) if words is None else words.format_map(context)
