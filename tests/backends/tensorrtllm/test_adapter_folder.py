"""A folder of adapters that is polled: directories appear, change, vanish, and are half copied."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from llmserve.backends.tensorrtllm.adapters import ServedAdapters
from llmserve.engine.adapters.sealed import SealedAdapter
from llmserve.engine.fake import fake_answer, fake_engine
from llmserve.engine.inflight import InflightEngine
from llmserve.errors import NotFound, Unsupported
from tests.backends.tensorrtllm.models import ids, load_model
from tests.backends.tensorrtllm.test_adapters import PROMPT, directories, named
from tests.engine.test_adapters import adapters


@pytest.fixture
def known(tmp_path: Path) -> list[SealedAdapter]:
    return adapters(tmp_path / "made", 3)


@pytest.fixture
def folder(tmp_path: Path, known: list[SealedAdapter]) -> Path:
    path = tmp_path / "folder"
    shutil.copytree(known[0].path, path / "style")
    (path / ".brief.tmp-1").mkdir()
    (path / "README").write_text("not an adapter")
    return path


@pytest.fixture
def engine() -> Iterator[InflightEngine]:
    made = fake_engine(step_delay_s=0.002)
    yield made
    made.close()


def served_by(engine: InflightEngine, folder: Path, **parameters: Any) -> ServedAdapters:
    served = load_model(engine, adapter_folder=str(folder), **parameters).adapters
    assert isinstance(served, ServedAdapters)
    return served


def digests(served: ServedAdapters) -> dict[str, str]:
    return {name: facts["digest"] for name, facts in served.facts().items()}


async def test_directories_come_change_and_go(engine: InflightEngine, folder: Path, known: list[SealedAdapter]) -> None:
    loaded = load_model(engine, adapter_folder=str(folder))
    (instance,), served = loaded.instances, loaded.adapters
    assert isinstance(served, ServedAdapters)
    assert digests(served) == {"style": known[0].digest}
    (stream,) = instance.execute([named("style", 40, streaming=True)])
    async with aclosing(stream) as begun:
        found = ids(await anext(begun))
        shutil.copytree(known[2].path, folder / "late")
        shutil.rmtree(folder / "style")
        shutil.copytree(known[1].path, folder / "style")
        served.poll()
        assert digests(served) == {"late": known[2].digest, "style": known[1].digest}
        (answer,) = [one async for one in instance.execute([named("style")])[0]]
        assert ids(answer) == fake_answer(PROMPT, 5, adapter=known[1].digest)
        shutil.rmtree(folder / "style")
        served.poll()
        assert digests(served) == {"late": known[2].digest}
        async for one in begun:
            found += ids(one)
    assert found == fake_answer(PROMPT, 40, adapter=known[0].digest), "a request under way keeps what it has found"


def test_what_is_half_copied_is_logged_once_and_tried_again_when_it_changes(
    engine: InflightEngine, folder: Path, known: list[SealedAdapter], caplog: pytest.LogCaptureFixture
) -> None:
    served = served_by(engine, folder)
    weights = (known[1].path / "weights.bin").read_bytes()
    shutil.copytree(known[1].path, folder / "late")
    (folder / "late/weights.bin").write_bytes(weights[: len(weights) // 2])
    (folder / "style/adapter.json").write_text("{")
    for _ in range(3):
        served.poll()
    late, style = (record.getMessage() for record in caplog.records if record.levelname == "ERROR")
    assert "adapter 'late' cannot be loaded until its files change: " in late
    assert "weights.bin was changed" in late
    assert "adapter 'style' cannot be loaded until its files change; the previous one stays loaded: " in style
    assert digests(served) == {"style": known[0].digest}
    (folder / "late/weights.bin").write_bytes(weights)
    shutil.copy(known[0].path / "adapter.json", folder / "style")
    served.poll()
    assert digests(served) == {"late": known[1].digest, "style": known[0].digest}


def test_a_folder_that_cannot_be_read_keeps_its_adapters(
    engine: InflightEngine, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served = served_by(engine, folder)
    folder.rename(folder.with_name("away"))
    for _ in range(2):
        served.poll()
    assert [record.levelname for record in caplog.records].count("ERROR") == 1, "said once"
    assert served.facts().keys() == {"style"}
    folder.with_name("away").rename(folder)
    shutil.rmtree(folder / "style")
    served.poll()
    assert served.facts() == {}


def test_a_name_that_was_given_otherwise_is_not_taken(
    engine: InflightEngine, folder: Path, known: list[SealedAdapter], caplog: pytest.LogCaptureFixture
) -> None:
    served = served_by(engine, folder, adapters=directories(style=known[2]))
    assert "an adapter has this name already" in caplog.text
    shutil.rmtree(folder / "style")
    served.poll()
    assert digests(served) == {"style": known[2].digest}


def test_a_models_name_is_not_taken(
    engine: InflightEngine, folder: Path, known: list[SealedAdapter], caplog: pytest.LogCaptureFixture
) -> None:
    served = served_by(engine, folder)
    shutil.copytree(known[1].path, folder / "ensemble")
    served.poll({"ensemble", "preprocessing"})
    assert digests(served) == {"style": known[0].digest}
    assert "adapter 'ensemble' cannot be loaded until its files change: a model has this name" in caplog.text


def test_what_can_never_work_keeps_the_model_from_loading(engine: InflightEngine, folder: Path) -> None:
    with pytest.raises(NotFound, match="folder of adapters"):
        load_model(fake_engine(), adapter_folder=str(folder / "none"))

    class Without:
        def __init__(self) -> None:
            self.info, self.submit, self.stats = engine.info, engine.submit, engine.stats
            self.healthy, self.close = engine.healthy, lambda: None

    with pytest.raises(Unsupported, match="does not support adapters"):
        load_model(Without(), adapter_folder=str(folder))
