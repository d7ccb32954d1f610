"""Measures the limits of this machine's first GPU.

python -m tools.gpu_check.bandwidth REPORT
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from llmserve.engine.cuda.bindings import driver_api
from llmserve.errors import InternalError

COPIED_BYTES = 1 << 30
ROUNDS = 20
PRODUCT_SIZE = 8192


def copied_bytes_per_s(api: Any, num_bytes: int = COPIED_BYTES) -> float:
    """Measures copies in device memory; bytes read and written both count. `api`: NVIDIA's driver bindings."""

    def call(name: str, *arguments: Any) -> Any:
        status, *results = getattr(api, name)(*arguments)
        if int(status) != 0:
            raise InternalError(f"{name} failed: {status}")
        return results[0] if results else None

    call("cuInit", 0)
    device = call("cuDeviceGet", 0)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", device))
    source, target = call("cuMemAlloc", num_bytes), call("cuMemAlloc", num_bytes)
    call("cuMemcpyDtoD", target, source, num_bytes)
    call("cuCtxSynchronize")
    started = time.perf_counter()
    for _ in range(ROUNDS):
        call("cuMemcpyDtoD", target, source, num_bytes)
    call("cuCtxSynchronize")
    seconds = time.perf_counter() - started
    for address in (source, target):
        call("cuMemFree", address)
    call("cuDevicePrimaryCtxRelease", device)
    return 2 * num_bytes * ROUNDS / seconds


def products_per_s() -> dict[str, float]:
    """Measures multiply-adds of torch's own product, by dtype; empty without a torch that supports CUDA."""
    try:
        import torch
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    found = {}
    for name in ("float16", "bfloat16"):
        a, b = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device="cuda", dtype=getattr(torch, name)) for _ in range(2))
        a @ b
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(ROUNDS):
            a @ b
        torch.cuda.synchronize()
        found[name] = ROUNDS * PRODUCT_SIZE**3 / (time.perf_counter() - started)
    return found


def main(report: str) -> None:
    content = {"copied_bytes_per_s": copied_bytes_per_s(driver_api()), "products_per_s": products_per_s()}
    Path(report).write_text(json.dumps(content))


if __name__ == "__main__":
    main(*sys.argv[1:])
