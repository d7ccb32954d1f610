"""all-MiniLM-L6-v2, a trained network: its embeddings beside those of sentence-transformers, or of transformers.

Skipped where `llmserve pull all-minilm-l6-v2` has not put it into models/ (`make test-minilm` does).
"""

from __future__ import annotations

import asyncio
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.cli.pull import CATALOGUE
from llmserve.core import GenerateRequest, SamplingParams
from llmserve.engine.open import open_engine
from llmserve.stages.whole_texts import WholeTexts
from tests.embedders import wanted_embedding

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "models/all-minilm-l6-v2"
PAGES = ("serve.md", "openai.md", "models.md")
ODD = ("", "hello", "你好，世界", "a" * 3000, "[SEP] between [CLS]", "word " * 200)
# What embeddings may lose: 1 - cosine. Weights of eight bits lose what they lose.
BOUNDS = {("float32", ""): 1e-9, ("float16", ""): 1e-5, ("float16", "int8"): 5e-3}

pytestmark = pytest.mark.skipif(not CHECKPOINT.is_dir(), reason="no models/all-minilm-l6-v2: make test-minilm")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    lines = [line for page in PAGES for line in (ROOT / "docs" / page).read_text().splitlines()]
    return [line for line in lines if 20 < len(line) < 700][:100] + list(ODD)


@pytest.fixture(scope="module")
def wanted(texts: list[str]) -> list[NDArray[np.float32]]:
    if find_spec("sentence_transformers"):
        original = import_module("sentence_transformers").SentenceTransformer(str(CHECKPOINT), device="cpu")
        return list(original.encode(texts, batch_size=1))
    from transformers import AutoModel

    model: Any = AutoModel.from_pretrained(CHECKPOINT).eval()
    stage = WholeTexts.open(CHECKPOINT)
    return [wanted_embedding(model, stage.ids(text, None)[0], "mean", normalize=True) for text in texts]


def embeddings(engine_dir: Path, texts: list[str]) -> list[NDArray[np.float32]]:
    """All in flight at once."""
    stage = WholeTexts.open(engine_dir)

    async def one(engine: Any, text: str) -> NDArray[np.float32]:
        ids, _ = stage.ids(text, None)
        request = GenerateRequest(text[:20], tuple(ids), SamplingParams(max_tokens=1), pooled=True)
        (event,) = [event async for event in engine.submit(request)]
        row: NDArray[np.float32] = event.logits[0]
        return row

    async def ask() -> list[NDArray[np.float32]]:
        engine = open_engine(engine_dir)
        try:
            return list(await asyncio.gather(*(one(engine, text) for text in texts)))
        finally:
            engine.close()

    return asyncio.run(ask())


def test_it_is_the_published_network() -> None:
    from llmserve.cli.pull import pull

    assert pull("all-minilm-l6-v2", CHECKPOINT.parent) == CHECKPOINT  # with these hashes nothing is downloaded
    assert CATALOGUE["all-minilm-l6-v2"].beside


@pytest.mark.parametrize(("dtype", "quantization"), BOUNDS)
def test_embeddings_are_those_of_the_original(
    dtype: str, quantization: str, texts: list[str], wanted: list[NDArray[np.float32]], tmp_path: Path
) -> None:
    build_engine(CHECKPOINT, tmp_path / "engine", BuildOptions(dtype=dtype, quantization=quantization))
    found = embeddings(tmp_path / "engine", texts)
    for row, exact in zip(found, wanted, strict=True):
        first, second = row.astype(np.float64), exact.astype(np.float64)
        cosine = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
        assert 1 - cosine < BOUNDS[dtype, quantization]
    for index in (0, len(texts) - 1):
        np.testing.assert_array_equal(embeddings(tmp_path / "engine", [texts[index]])[0], found[index])
