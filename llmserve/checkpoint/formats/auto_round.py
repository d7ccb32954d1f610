"""AutoRound's folders, as far as their weights are packed like GPTQ's or AWQ's.

`packing_format` names the packing, and `extra_config` has what differs for single modules. Its keys are names of
modules, or regular expressions that are searched in them. From auto-round 0.16.1: inference/convert_model.py, and
auto_round_extension/torch. Before version 0.5, the method was called intel/auto-round, and `backend` named the packing
and a kernel (0.4.7's backend.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llmserve.checkpoint.formats.awq import Awq
from llmserve.checkpoint.formats.base import read_group_size
from llmserve.checkpoint.formats.gptq import SHIFTS, Gptq, Settings, overridden
from llmserve.checkpoint.formats.listed import ListedModules, Pattern
from llmserve.models.config import ConfigReader

DEFAULT, AWQ = "auto_round:auto_gptq", "auto_round:auto_awq"
PACKINGS: Mapping[str, str] = {  # to GPTQ's version, or AWQ
    DEFAULT: "gptq",
    "auto_round:gptq": "gptq",
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    AWQ: AWQ,
    "auto_round:awq": AWQ,
}
NAME = re.compile(r"[\w.-]+")  # a key that is no regular expression
OLD_METHOD = "intel/auto-round"
KERNEL = re.compile(r":(exllamav2|triton|tritonv2|cuda|gemm)\Z")
WHOLE = 16  # bits of a module that is not quantized


def auto_round(reader: ConfigReader) -> Gptq | Awq:
    """From the config that AutoRound has written, whose problems are added to the reader's."""
    is_old = str(reader.get("quant_method")).lower() == OLD_METHOD
    packing = reader.get("backend" if is_old else "packing_format", DEFAULT)
    if is_old and isinstance(packing, str):
        packing = KERNEL.sub("", packing)
    kind = PACKINGS.get(str(packing), "")
    if not kind:
        reader.problems.append(
            f"packing {packing!r} is not supported; supported: {', '.join(PACKINGS)}. Export the model again "
            "with --format auto_round, or use the original checkpoint"
        )
    reader.expect("data_type", "int")
    reader.expect("act_bits", WHOLE, 32)
    if rotation := reader.get("rotation_config"):
        reader.problems.append(f"rotation_config {rotation!r} is not supported; quantize it again without it")
    bits = reader.integer("bits", 4, maximum=32)
    reader.expect("bits", *((4,) if kind == AWQ else (4, 8)))
    size = read_group_size(reader.get("group_size", 128), "group_size", reader.problems)
    settings = Settings(bits if bits in (4, 8) else 4, size, reader.flag("sym", True), has_order=False)
    special = _special(reader, settings)
    if kind != AWQ:
        return Gptq(settings, SHIFTS.get(kind, 0), tuple(special.values()))
    if changed := [text for text, (_, own) in special.items() if own not in (None, settings)]:
        reader.problems.append(f"extra_config {changed[0]!r}: AWQ's packing must be the same for all modules")
    kept = [text for text, (_, own) in special.items() if own is None]
    kept = [text if NAME.fullmatch(text) else f"re:{_searched(text)}" for text in kept]
    return Awq(size, settings.symmetric, ListedModules(kept))


def _special(reader: ConfigReader, settings: Settings) -> dict[str, tuple[Pattern, Settings | None]]:
    """By key, those that are names first, because they go before regular expressions."""
    found: dict[str, tuple[Pattern, Settings | None]] = {}
    extra = reader.get("extra_config", {})
    if not isinstance(extra, Mapping) or not all(isinstance(own, Mapping) for own in extra.values()):
        reader.problems.append(f"extra_config must be an object of objects, got {extra!r}")
        return found
    for text, own in sorted(extra.items(), key=lambda item: NAME.fullmatch(item[0]) is None):
        try:
            pattern = Pattern(rf"{re.escape(text)}\Z" if NAME.fullmatch(text) else _searched(text))
        except ValueError as error:
            reader.problems.append(f"extra_config: {error}")
            continue
        found[text] = (pattern, _own(own, settings, f"extra_config {text!r}", reader.problems))
    return found


def _own(own: Mapping[str, Any], settings: Settings, key: str, problems: list[str]) -> Settings | None:
    """None: the module is not quantized."""
    if own.get("bits") in (WHOLE, 32):
        return None
    said = ConfigReader(own)
    said.expect("data_type", "int")
    said.expect("act_bits", WHOLE, 32)
    problems += [f"{key}: {problem}" for problem in said.problems]
    return overridden({name: value for name, value in own.items() if value is not None}, settings, key, problems)


def _searched(text: str) -> str:
    return f".*(?:{text})"
