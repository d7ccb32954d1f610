"""SmolLM2-135M-Instruct, a trained network: a GGUF file that `llmserve pull` fetches."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "models/smollm2-135m-instruct.gguf"
ENGINES = ROOT / "engines"
PRECISIONS: dict[str, tuple[str, ...]] = {
    "float16": ("--dtype", "float16"),
    "int8": ("--quantization", "int8"),
    "int4": ("--quantization", "int4"),
}
