"""Options that only the cpu target has: none; the common options are sufficient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmserve.builder.targets.options import TargetOptions


@dataclass(frozen=True, slots=True)
class CpuOptions(TargetOptions):
    keeps_blocks: ClassVar[bool] = True
