"""Compares the installed TensorRT-LLM with the names that we use, and writes the result as JSON.

    python -m tools.gpu_check.names REPORT

It needs its own process: importing the package starts CUDA and MPI, prints, and may crash.
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
