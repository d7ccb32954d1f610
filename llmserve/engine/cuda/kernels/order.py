"""Kernels behind each other, without the pause between two launches."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

IS_EARLY: tl.constexpr = tl.constexpr(False)  # the compiler says so of architectures that begin a launch early


@triton.jit
def wait_for_earlier():
    """Every kernel begins with this: programs of the next launch may be set up from here on, and nothing is read or
    written before the launches before this one have ended.

    Also where a program has nothing to do: what follows waits for this launch only, and so for all before it.
    """
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
