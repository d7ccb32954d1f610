"""Prints, as its last line, the comparison of the installed TensorRT-LLM with the names that we use, as JSON.

A process of its own: importing the package starts CUDA and MPI, prints, and may crash.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from llmserve.engine.tensorrt_llm.library import installed
from llmserve.engine.tensorrt_llm.names import compare

if __name__ == "__main__":
    print(json.dumps(asdict(compare(installed().mode))), flush=True)
