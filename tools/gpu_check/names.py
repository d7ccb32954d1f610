"""The installed TensorRT-LLM beside the names that we use, as JSON.

    python -m tools.gpu_check.names REPORT

A process of its own: importing the package starts CUDA and MPI, prints, and may crash.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from llmserve.engine.tensorrt_llm.library import installed
from llmserve.engine.tensorrt_llm.names import compare

if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(asdict(compare(installed().mode))))
