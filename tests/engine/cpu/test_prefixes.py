"""KV blocks of sealed prefixes are what a cold prefill computes, bit for bit; what does not fit is a miss."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from llmserve.builder import prefix as prefix_module
from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.builder.prefix import Prefix, seal_prefixes
from llmserve.engine.cpu.runner import available_isas, read_header
from llmserve.engine.directory.artifact import MANIFEST_FILE, EngineDirectory
from llmserve.engine.directory.manifest import FileRecord
from llmserve.engine.kv_files.sealed_prefixes import MAGIC
from llmserve.engine.open import open_engine
from llmserve.engine.remote.process import ProcessEngine
from llmserve.engine.settings import EngineSettings, GpuSettings
from llmserve.errors import EngineFileError, InvalidArgument, Unsupported
from llmserve.scheduler.settings import SchedulerSettings
from llmserve.stages.chat import Message
from llmserve.stages.preprocess import Preprocessor
from tests.checkpoints import make_checkpoint
from tests.contracts.engine_process import COMMAND as PROCESS
from tests.engine.cpu.full_answers import Answer, full_answers

BLOCK = 8
TEXTS = ("the cat sat on the mat and looked at the rain. ", "one two three four five six seven eight nine ten. ")
PREFIXES = [Prefix(f"{text[:3]}.txt", text) for text in TEXTS]
OPTIONS = {
    "float32": BuildOptions(dtype="float32"),
    "int8 cache": BuildOptions(dtype="float16", quantization="int4", kv_cache_dtype="int8"),
    "qwen3.5": BuildOptions(dtype="float32"),  # with states
    "cohere2": BuildOptions(dtype="float32"),  # two of three layers read 16 tokens
}
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module", params=OPTIONS)
def engine_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = str(request.param)
    folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
    make_checkpoint(folder / "checkpoint", name if name in ("qwen3.5", "cohere2") else "llama")
    options = replace(OPTIONS[name], tokens_per_block=BLOCK, max_num_tokens=32, max_batch_size=4)
    build_engine(folder / "checkpoint", folder / "engine", options)
    return folder / "engine"


@pytest.fixture
def sealed(engine_dir: Path, tmp_path: Path) -> Path:
    shutil.copytree(engine_dir, tmp_path / "engine")
    seal_prefixes(tmp_path / "engine", PREFIXES)
    return tmp_path / "engine"


def prompts(path: Path) -> list[tuple[int, ...]]:
    tokenizer = Preprocessor.open(path).tokenizer
    return [tuple(tokenizer.encode(text + "What else?", add_special_tokens=True)) for text in TEXTS]


def answers(path: Path, settings: EngineSettings | None = None, *, own: bool = False) -> tuple[list[Answer], list[int]]:
    """Of a fresh engine. Also how many tokens of each prompt were found."""
    settings = settings or EngineSettings(max_kv_tokens=512)
    engine = ProcessEngine(PROCESS, path, path, settings) if own else open_engine(path, settings)
    return full_answers(engine, prompts(path))


def test_the_first_request_of_a_fresh_engine_finds_them(engine_dir: Path, sealed: Path) -> None:
    cold, none = answers(engine_dir)
    assert none == [0, 0]
    before = EngineDirectory.open(engine_dir).manifest
    directory = EngineDirectory.open(sealed)
    assert replace(directory.manifest, prefixes={}) == before, "the engine is another"
    found, cached = answers(sealed)
    assert found == cold
    preprocessor = Preprocessor.open(sealed)
    shared = [len(prefix.token_ids(preprocessor)) // BLOCK * BLOCK for prefix in PREFIXES]
    assert cached == shared
    assert min(shared) >= 3 * BLOCK
    again, cached = answers(sealed, own=True)
    assert (again, cached) == (cold, shared)
    directory.verify()
    assert "prefixes" not in json.loads((engine_dir / MANIFEST_FILE).read_text())


def test_a_cache_without_room_for_all_has_their_beginnings(sealed: Path, engine_dir: Path) -> None:
    longest = max(map(len, prompts(sealed))) + 12
    small = EngineSettings(max_kv_tokens=-(-longest // BLOCK) * BLOCK)
    found, cached = answers(sealed, small)
    assert found == answers(engine_dir)[0]
    assert cached[0] >= 3 * BLOCK


def test_files_of_the_cache_have_them_too(sealed: Path, tmp_path: Path) -> None:
    settings = EngineSettings(max_kv_tokens=512, gpu=GpuSettings(kv_cache_dir=str(tmp_path / "kv")))
    first, cached = answers(sealed, settings)
    again, more = answers(sealed, settings)
    assert first == again
    assert sum(more) > sum(cached) > 0  # the rest of the prompts, from files


@pytest.mark.parametrize("engine_dir", ["cohere2"], indirect=True)
def test_of_layers_with_a_window_the_end_is_kept(sealed: Path, engine_dir: Path) -> None:
    """Who shares less computes it all, and leaves what the next one finds."""
    [name] = EngineDirectory.open(sealed).manifest.prefixes
    header = read_header(EngineDirectory.open(sealed).engine_file)
    lengths = [len(prefix.token_ids(Preprocessor.open(sealed))) // BLOCK for prefix in PREFIXES]
    num_blocks = sum(lengths) + len(PREFIXES) * 2 * 16 // BLOCK
    content = (sealed / name).read_bytes().removeprefix(MAGIC).partition(b"\n")[2]
    assert len(content) == num_blocks * header.kv_bytes_per_block // 3 < sum(lengths) * header.kv_bytes_per_block
    ids = prompts(sealed)[0]
    shorter = [ids[: (lengths[0] - 1) * BLOCK + 1], ids[: lengths[0] * BLOCK + 1], ids[: (lengths[0] - 1) * BLOCK + 1]]
    cold, _ = full_answers(open_engine(engine_dir, EngineSettings(max_kv_tokens=512)), shorter)
    found, cached = full_answers(open_engine(sealed, EngineSettings(max_kv_tokens=512)), shorter)
    assert found == cold
    assert cached == [0, lengths[0] * BLOCK, (lengths[0] - 1) * BLOCK]


def record_as(path: Path, data: bytes) -> None:
    """As if the manifest said so."""
    manifest = EngineDirectory.open(path).manifest
    [name] = manifest.prefixes
    (path / name).write_bytes(data)
    record = FileRecord(len(data), hashlib.sha256(data).hexdigest())
    (path / MANIFEST_FILE).write_text(replace(manifest, prefixes={name: record}).to_json())


@pytest.mark.parametrize("engine_dir", ["float32"], indirect=True)
def test_what_does_not_fit_is_a_miss_and_a_word_in_the_log(
    engine_dir: Path, sealed: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold, _ = answers(engine_dir)
    [name] = EngineDirectory.open(sealed).manifest.prefixes
    data = (sealed / name).read_bytes()
    header, _, content = data.removeprefix(MAGIC).partition(b"\n")

    def misses(words: str) -> None:
        caplog.clear()
        assert answers(sealed) == (cold, [0, 0])
        [said] = [one.message for one in caplog.records if one.levelno >= logging.WARNING]
        assert words in said
        assert "llmserve prefix" in said

    def changed(**values: object) -> bytes:
        return MAGIC + json.dumps(json.loads(header) | values).encode() + b"\n" + content

    (sealed / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    misses("was changed: its SHA-256 is not the one in the manifest")
    with pytest.raises(EngineFileError, match=r"prefixes-.* was changed"):
        EngineDirectory.open(sealed).verify()
    (sealed / name).unlink()
    misses("No such file")
    for other in (
        {"engine": "0" * 64},
        {"block_size": 2 * BLOCK},
        {"block_bytes": 1},
        {"kernels": "neon"},
        {"state_bytes": 4},
        {"num_tables": 2},
    ):
        record_as(sealed, changed(**other))
        misses("belongs to another engine, or its KV blocks have another format")
    record_as(sealed, changed(prefixes=[]))
    misses("bytes of blocks, its prefixes 0 blocks")
    record_as(sealed, b"something else")
    misses("are not used")
    record_as(sealed, data)
    assert sum(answers(sealed)[1]) > 0
    if available_isas()[-1] != "portable":
        monkeypatch.setenv("LLMSERVE_ISA", "portable")
        caplog.clear()
        assert answers(sealed)[1] == [0, 0]
        assert f"they are for other kernels ({name}); this machine has portable" in caplog.text


@pytest.mark.parametrize("engine_dir", ["float32"], indirect=True)
def test_an_operator_can_turn_reuse_off(sealed: Path) -> None:
    settings = EngineSettings(max_kv_tokens=512, scheduler=SchedulerSettings(enable_block_reuse=False))
    assert answers(sealed, settings)[1] == [0, 0]


@pytest.mark.parametrize("engine_dir", ["float32"], indirect=True)
def test_what_is_too_long_or_too_short_is_refused(engine_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"long.txt has \d+ tokens, but .* at most 256") as refused:
        seal_prefixes(engine_dir, [Prefix("long.txt", TEXTS[0] * 30), *PREFIXES, Prefix("longer.txt", TEXTS[1] * 60)])
    assert "longer.txt: the prompt is too long" in str(refused.value)
    with pytest.raises(InvalidArgument, match=r"short.txt has \d tokens, but a KV block of this engine has 8"):
        seal_prefixes(engine_dir, [Prefix("short.txt", "the")])
    for path, is_chat, words in (
        (tmp_path / "none.json", True, "none.json cannot be read"),
        (tmp_path / "bad.json", True, "bad.json: messages is not valid JSON"),
    ):
        (tmp_path / "bad.json").write_text("{")
        with pytest.raises(InvalidArgument, match=words):
            Prefix.read(path, is_chat=is_chat)


@pytest.mark.parametrize("engine_dir", ["float32"], indirect=True)
def test_what_chats_have_in_common_is_what_their_template_makes_of_it(engine_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(engine_dir, tmp_path / "engine")
    (tmp_path / "engine" / "chat_template.jinja").write_text(CHAT)
    preprocessor = Preprocessor.open(tmp_path / "engine")
    system = Prefix("s", messages=[Message("system", TEXTS[0])])
    text = f"<system>{TEXTS[0]}<user>"
    whole = preprocessor.tokenizer.encode_marked(text + "Q")
    ids = system.token_ids(preprocessor)
    assert len(ids) >= len(preprocessor.tokenizer.encode_marked(text)) - 2
    assert tuple(whole[: len(ids)]) == ids
    asked = Prefix("s", messages=[*system.messages, Message("user", "Hello")])
    assert asked.token_ids(preprocessor)[: len(ids)] == ids


@pytest.mark.parametrize("engine_dir", ["float32"], indirect=True)
def test_an_engine_that_keeps_no_blocks_is_refused(engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of another target, for which `kv_cache_dir` has no effect."""
    without = lambda path, settings: open_engine(path, replace(settings, gpu=GpuSettings()))  # noqa: E731
    monkeypatch.setattr(prefix_module, "open_engine", without)
    with pytest.raises(Unsupported, match="cannot keep KV blocks"):
        seal_prefixes(engine_dir, PREFIXES)
