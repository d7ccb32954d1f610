"""`llmserve` on a machine whose GPU interprets kernels: python -m tests.fakes.interpreted_gpu serve ENGINE"""

from __future__ import annotations

from llmserve.cli.main import main
from llmserve.engine.cuda.runtime import RUNTIME, CudaRuntime
from tests.engine.cuda.fake_device import FakeDevice

if __name__ == "__main__":
    assert isinstance(RUNTIME, CudaRuntime)
    RUNTIME._open_device = lambda ordinal: FakeDevice(ordinal=ordinal)
    main()
