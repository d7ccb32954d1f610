"""The required format of an answer, in the fields of OpenAI, vLLM and llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, JsonValue, model_validator

from llmserve.frontends.text.answers.failures import Refused
from llmserve.frontends.text.requests.ensembles import Values
from llmserve.frontends.text.requests.validation import Strict, ignored, refused
from llmserve.stages.tool_formats.grammars import literal

ANY_OBJECT: Mapping[str, JsonValue] = {"type": "object"}
MAX_CHOICES = 512
SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
SAYS_ALL = ("additionalProperties", "unevaluatedProperties", "patternProperties", "$ref", "allOf")  # on unlisted names
UNTOUCHED = ("enum", "const", "default", "examples")  # values, not schemas
OTHER_WORDS = {  # fields of a request -> their names in `structured_outputs`
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
    "json_schema": "json", "grammar": "grammar",
}  # fmt: skip


def _schema_of(value: Any) -> Any:
    """Parse a schema that was sent as text, as some clients do."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError("a schema given as a string must be JSON") from error


SchemaDocument: TypeAlias = Annotated[dict[str, JsonValue], BeforeValidator(_schema_of)]
Text: TypeAlias = Annotated[str, Field(min_length=1)]
Choices: TypeAlias = Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)]


def closed(schema: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """The schema with only the listed properties in its objects, unless an object describes other properties.

    The parts of an `allOf` describe the same object, so a schema with several parts is not changed.
    """
    try:
        return dict(schema) if _has_parts(schema) else _closed(schema)
    except RecursionError:
        raise Refused("the schema is nested too deeply", "response_format") from None


def _closed(value: Any, *, is_schema: bool = True) -> Any:
    """`is_schema`: the names in an object are keywords; otherwise they are names of schemas."""
    if isinstance(value, list):
        return [_closed(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    if not is_schema:
        return {name: _closed(each) for name, each in value.items()}
    found = {
        name: each if name in UNTOUCHED else _closed(each, is_schema=name not in SCHEMAS_BY_NAME)
        for name, each in value.items()
    }
    if isinstance(found.get("properties"), dict) and not any(name in found for name in SAYS_ALL):
        found["additionalProperties"] = False
    return found


def _has_parts(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_has_parts, value))
    if not isinstance(value, Mapping):
        return False
    parts = value.get("allOf")
    return (isinstance(parts, list) and len(parts) > 1) or any(map(_has_parts, value.values()))


class JsonSchema(Strict):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, JsonValue] = Field(alias="schema")
    strict: bool | None = Field(None, description="Objects have only the properties that the schema lists.")

    def document(self) -> dict[str, JsonValue]:
        return closed(self.schema_) if self.strict else self.schema_


class TextFormat(Strict):
    type: Literal["text"]


class JsonFormat(Strict):
    type: Literal["json_object"]
    schema_: SchemaDocument | None = Field(None, alias="schema", description="As in llama.cpp.")

    def document(self) -> Mapping[str, JsonValue]:
        return ANY_OBJECT if self.schema_ is None else self.schema_


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema | None = None
    schema_: SchemaDocument | None = Field(None, alias="schema", description="As in llama.cpp, instead of json_schema.")

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if (self.json_schema is None) == (self.schema_ is None):
            raise ValueError("give json_schema, or llama.cpp's schema")
        return self

    def document(self) -> Mapping[str, JsonValue]:
        return self.json_schema.document() if self.json_schema is not None else self.schema_ or {}


ResponseFormat: TypeAlias = Annotated[TextFormat | JsonFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Strict):
    """As in vLLM: formats that `response_format` cannot express."""

    json_: SchemaDocument | None = Field(None, alias="json")
    regex: Text | None = Field(None, description="The answer matches this regular expression.")
    choice: Choices | None = Field(None, description="The answer is one of these texts.")
    grammar: Text | None = Field(None, description="The answer follows this grammar.")
    json_object: bool | None = Field(None, description="The answer is any JSON object.")
    structural_tag: Annotated[Any, refused("structural tags are not supported")] = None
    disable_additional_properties: bool | None = Field(None, description="Objects have only the listed properties.")
    disable_fallback: Annotated[Any, ignored("only one backend is supported", False, True)] = None
    disable_any_whitespace: Annotated[Any, refused("whitespace can be limited, not turned off", False)] = None
    whitespace_pattern: Annotated[Any, refused("the whitespace pattern is fixed")] = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if len(self._guides()) != 1:
            raise ValueError("give one of json, regex, choice, grammar and json_object")
        return self

    def values(self) -> Values:
        ((kind, guide),) = self._guides().values()
        return {"guided_decoding_guide_type": [kind]} if guide is None else guide_values(kind, guide)

    def schema_(self) -> Mapping[str, JsonValue] | None:
        """The schema of the answer, if the format is a schema."""
        if self.json_object:
            return ANY_OBJECT
        return closed(self.json_) if self.json_ is not None and self.disable_additional_properties else self.json_

    def _guides(self) -> dict[str, tuple[str, str | None]]:
        found: dict[str, tuple[str, str | None]] = {}
        if self.json_ is not None:
            found["json"] = "json_schema", json.dumps(self.schema_())
        if self.regex is not None:
            found["regex"] = "regex", self.regex
        if self.choice is not None:
            found["choice"] = "ebnf_grammar", "start: " + " | ".join(map(literal, dict.fromkeys(self.choice)))
        if self.grammar is not None:
            found["grammar"] = "ebnf_grammar", self.grammar
        if self.json_object:
            found["json_object"] = "json", None
        return found


class Formatted(Strict):
    """The fields of a request that set the format of the answer."""

    response_format: ResponseFormat | None = Field(None, description="text, a JSON object, or a JSON schema.")
    structured_outputs: StructuredOutputs | None = Field(None, description="Formats as in vLLM.")
    guided_json: SchemaDocument | None = Field(None, description="As in older releases of vLLM.")
    guided_regex: Text | None = Field(None, description="As in older releases of vLLM.")
    guided_choice: Choices | None = Field(None, description="As in older releases of vLLM.")
    guided_grammar: Text | None = Field(None, description="As in older releases of vLLM.")
    guided_decoding_backend: Annotated[Any, ignored("only one backend is supported")] = None
    guided_whitespace_pattern: Annotated[Any, refused("the whitespace pattern is fixed")] = None
    grammar: Text | None = Field(None, description="As in llama.cpp: a GBNF grammar.")
    json_schema: SchemaDocument | None = Field(None, description="As in llama.cpp.")

    @model_validator(mode="after")
    def _has_one_format(self) -> Self:
        names = [name for name in ("structured_outputs", *OTHER_WORDS) if getattr(self, name) is not None]
        if not isinstance(self.response_format, TextFormat | None):
            names.insert(0, "response_format")
        if len(names) > 1:
            raise ValueError(f"{' and '.join(names)} both set the format of the answer: give only one")
        return self

    @property
    def says_format(self) -> bool:
        return self.outputs() is not None or format_schema(self.response_format) is not None

    def outputs(self) -> StructuredOutputs | None:
        """The format in the terms of `structured_outputs`, if a field other than `response_format` sets it."""
        for name, word in OTHER_WORDS.items():
            if (value := getattr(self, name)) is not None:
                return StructuredOutputs.model_validate({word: value})
        return self.structured_outputs

    def answer_schema(self) -> Mapping[str, JsonValue] | None:
        """The schema of the answer, if the format is a schema."""
        outputs = self.outputs()
        return format_schema(self.response_format) if outputs is None else outputs.schema_()

    def answer_choices(self) -> Sequence[str]:
        """The possible answers; empty: any text."""
        outputs = self.outputs()
        return (outputs.choice if outputs is not None else None) or ()

    def format_values(self) -> Values:
        """The inputs of the ensemble that enforce the format."""
        outputs = self.outputs()
        if outputs is not None:
            return outputs.values()
        schema = format_schema(self.response_format)
        if schema is ANY_OBJECT:
            return {"guided_decoding_guide_type": ["json"]}
        return {} if schema is None else guide_values("json_schema", json.dumps(schema))


def guide_values(kind: str, guide: str) -> Values:
    return {"guided_decoding_guide_type": [kind], "guided_decoding_guide": [guide]}


def format_schema(wanted: TextFormat | JsonFormat | JsonSchemaFormat | None) -> Mapping[str, JsonValue] | None:
    """The schema that an answer must match; None: any text."""
    return wanted.document() if isinstance(wanted, JsonFormat | JsonSchemaFormat) else None
