"""The operator that quantizes weights, registered with torch when this is imported."""

import torch

OPERATOR = "symmetric_quantize_last_axis_of_batched_matrix"


def _quantize(weight: torch.Tensor, quant_type: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale per column. The values stay where they are; the real layout depends on the GPU."""
    assert weight.dtype in (torch.float16, torch.bfloat16, torch.float32), (
        "Invalid datatype. Weight must be FP16 or BF16"
    )
    assert weight.is_contiguous(), "weight must be contiguous"
    bits = {torch.int8: 8, torch.quint4x2: 4}[quant_type]
    half = 1 << (bits - 1)
    scales = weight.float().abs().amax(dim=0) / half
    values = torch.where(scales > 0, weight.float() / scales, 0).round().clamp(-half, half - 1).to(torch.int8)
    if bits == 4:
        values = (values[:, 0::2] & 0x0F) | (values[:, 1::2] << 4)
    return values.contiguous(), scales.to(weight.dtype)


if not hasattr(torch.ops.trtllm, OPERATOR):  # a test may import this fake again; torch keeps operators for ever
    _library = torch.library.Library("trtllm", "DEF")
    _library.define(f"{OPERATOR}(Tensor weight, ScalarType quant_type) -> (Tensor, Tensor)")
    _library.impl(OPERATOR, _quantize, "CPU")
    torch.fake_trtllm_library = _library  # it unregisters when it is collected
