"""Schemas whose every value comes back to itself are told, and no others."""

from __future__ import annotations

from typing import Any

import pytest

from llmserve.stages.endless_schemas import endless_problem


def object_of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


ROOT, A, B, NULL = {"$ref": "#"}, {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"type": "null"}
ENDLESS: dict[str, tuple[dict[str, Any], str]] = {
    "itself": (object_of(n=ROOT), "#/properties/n"),
    "behind others": (object_of(x={"type": "string"}, y=object_of(n=ROOT)), "#/properties/y/properties/n"),
    "two": ({**A, "$defs": {"a": object_of(b=B), "b": object_of(a=A)}}, "#/$defs/b/properties/a"),
    "items": ({"type": "array", "minItems": 1, "items": ROOT}, "#/items"),
    "first items": ({"type": "array", "minItems": 2, "prefixItems": [NULL, ROOT]}, "#/prefixItems/1"),
    "every choice": (object_of(n={"anyOf": [ROOT, object_of(m=ROOT)]}), "#/properties/n/anyOf/0"),
    "a part of all": (object_of(n={"allOf": [{"type": "object"}, ROOT]}), "#/properties/n/allOf/1"),
}
FINITE: dict[str, Any] = {
    "true": True,
    "optional": {**object_of(n=ROOT), "required": []},
    "one choice": object_of(n={"oneOf": [ROOT, NULL]}),
    "any type": {"properties": {"n": ROOT}, "required": ["n"]},
    "no items": {"type": "array", "items": ROOT},
    "enough items": {"type": "array", "minItems": 1, "prefixItems": [NULL], "items": ROOT},
    "twice, not itself": {**object_of(a=A, b=A), "$defs": {"a": object_of(b=B), "b": NULL}},
    "a choice further on": {**A, "$defs": {"a": object_of(b=B), "b": {"anyOf": [A, object_of(c=NULL)]}}},
    "escapes": {**object_of(a={"$ref": "#/$defs/x~1%7E"}), "$defs": {"x/~": NULL}},
    "nowhere": object_of(a={"$ref": "#/$defs/none"}, b={"$ref": "http://example.com"}),
    "of other types": {"type": "object", "required": "n", "properties": 3, "anyOf": {}, "$ref": 3},
}


@pytest.mark.parametrize("name", ENDLESS)
def test_the_part_that_comes_back_is_named(name: str) -> None:
    schema, path = ENDLESS[name]
    assert endless_problem(schema).startswith(f"every value would be endless, because {path} requires itself")


@pytest.mark.parametrize("name", FINITE)
def test_what_may_end_is_left_alone(name: str) -> None:
    assert endless_problem(FINITE[name]) == ""


@pytest.mark.parametrize("length", [20, 5000])
def test_a_search_ends(length: int) -> None:
    """With two ways from each to the next there are 2**20, and a chain may be longer than Python's stack."""
    parts = {f"a{i}": object_of(x={"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2}) for i in range(length)}
    schema = {"$ref": "#/$defs/a0", "$defs": {**parts, f"a{length}": object_of(x={"$ref": "#/$defs/a0"})}}
    assert endless_problem(schema) == ""
