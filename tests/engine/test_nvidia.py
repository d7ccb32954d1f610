"""The NVIDIA GPUs of a machine, as a fake nvidia-smi lists them."""

from __future__ import annotations

import pytest

from llmserve.engine.machine.nvidia import visible_gpus
from llmserve.errors import Unsupported
from tests.fakes.gpu_machine import gpu_machine


def test_gpus_are_those_that_cuda_would_see() -> None:
    with gpu_machine("1.2", FAKE_GPUS="3", CUDA_VISIBLE_DEVICES="2,GPU-0000-0,7,1"):
        assert [gpu.index for gpu in visible_gpus()] == [2, 0]
    with gpu_machine("1.2", CUDA_VISIBLE_DEVICES=""), pytest.raises(Unsupported, match="CUDA_VISIBLE_DEVICES"):
        visible_gpus()
    with pytest.raises(Unsupported, match="nvidia-smi was not found"):
        visible_gpus()
    with gpu_machine("1.2", FAKE_GPUS="broken"), pytest.raises(Unsupported, match=r"(?s)nvidia-smi failed: .*broken"):
        visible_gpus()
