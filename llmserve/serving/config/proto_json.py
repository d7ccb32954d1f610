"""Protocol messages as Triton writes them in JSON: proto field names, enums as names, 64-bit integers as numbers.

(`google.protobuf.json_format` writes 64-bit integers as strings, which readers of a model's config do not expect.)
"""

from __future__ import annotations

import base64
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message


def message_to_dict(message: Message) -> dict[str, Any]:
    """Every field that is set or has no presence, defaults included."""
    return {
        field.name: _field_value(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _field_value(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entry = field.message_type.fields_by_name["value"]
        return {str(key): _scalar_value(entry, item) for key, item in value.items()}
    if field.is_repeated:
        return [_scalar_value(field, item) for item in value]
    return _scalar_value(field, value)


def _scalar_value(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return message_to_dict(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    return value
