"""Other projects' names of number formats, and what to write here instead: `--dtype int8` is a good guess elsewhere."""

from __future__ import annotations

from llmserve.models import number_formats

FLOATS = {
    "fp16": "float16", "f16": "float16", "half": "float16", "bf16": "bfloat16",
    "fp32": "float32", "f32": "float32", "float": "float32",
}  # fmt: skip
INTEGERS = {"int8": "int8", "i8": "int8", "w8a8": "int8", "int4": "int4", "i4": "int4", "w4a8": "int4"}
NEAREST = {  # formats that no engine supports -> the format with as many bits, or the next larger one
    **dict.fromkeys(("fp8", "float8", "float8_e4m3fn", "float8_e5m2", "w8a8_fp8", "w8a16", "q8_0", "int8_sq"), "int8"),
    **dict.fromkeys(("fp4", "nvfp4", "mxfp4", "w4a16", "q4_0", "int4_awq", "int4_gptq"), "int4"),
}  # fmt: skip


OPTIONS = ("dtype", "quantization", "kv_cache_dtype")


def advice(option: str, name: str) -> str:
    """Returns the name to use instead of the unsupported `name` of `option`; empty if unknown."""
    if option not in OPTIONS:
        return ""
    known = FLOATS.get(name.lower(), name.lower())
    if known in number_formats.FLOATS and option == "kv_cache_dtype":
        return f"write --kv-cache-dtype {known}"
    if known in number_formats.FLOATS:
        elsewhere = "" if option == "dtype" else f" and leave --{option.replace('_', '-')} out"
        return f"write --dtype {known}{elsewhere}"
    if known in INTEGERS and (option != "kv_cache_dtype" or INTEGERS[known] in number_formats.CACHES):
        return f"write {_flags(INTEGERS[known], option)}"
    nearest = NEAREST.get(known) or INTEGERS.get(known)
    return f"no engine supports {name}; the nearest is {_flags(nearest, option)}" if nearest else ""


def _flags(integers: str, option: str) -> str:
    if option == "kv_cache_dtype":
        return "--kv-cache-dtype int8"
    return f"--dtype float16 --quantization {integers}" if option == "dtype" else f"--quantization {integers}"
