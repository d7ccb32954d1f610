"""`build_engine` around a fake target: what is written, what is refused, what is left behind."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.checkpoint.reader import Checkpoint
from llmserve.engine.directory import build_time
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.directory.build_time import BUILD_TIME_FILE, BuildTime
from llmserve.errors import (
    AlreadyExists,
    CheckpointError,
    EngineFileError,
    InvalidArgument,
    RecipeError,
    ResourceExhausted,
    Unsupported,
)
from llmserve.progress import Phase
from llmserve.stages.files import TextFiles
from tests.builder.contents import contents
from tests.builder.fake_target import FakeTarget
from tests.checkpoints import make_checkpoint, write_json
from tests.embedders import write_sentence_transformers

FLOAT32 = BuildOptions(dtype="float32")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", "baichuan2-7b")


def build(checkpoint: Path, output: Path, options: BuildOptions = FLOAT32, target: FakeTarget | None = None) -> None:
    build_engine(checkpoint, output, options, target=target or FakeTarget())


class RecordedProgress:
    def __init__(self) -> None:
        self.phases: list[tuple[str, int]] = []
        self.done: dict[str, int] = {}
        self.expected: list[str] = []

    def expect(self, phases: Sequence[Phase]) -> None:
        self.expected = [phase.name for phase in phases]

    def phase(self, name: str, total_bytes: int) -> None:
        self.phases.append((name, total_bytes))
        self.done[name] = 0

    def advance(self, what: str, num_bytes: int) -> None:
        self.done[self.phases[-1][0]] += num_bytes


def test_the_directory_holds_what_serving_needs(checkpoint: Path, tmp_path: Path) -> None:
    manifest = build_engine(checkpoint, tmp_path / "e", FLOAT32, target=FakeTarget())
    directory = EngineDirectory.open(tmp_path / "e")
    assert directory.manifest == manifest
    assert sorted(manifest.files) == [
        "config.json", "generation_config.json", "hf_config.json", "program.txt", "rank0.engine", "selftest.npz",
        "tokenizer.model", "tokenizer_config.json",
    ]  # fmt: skip
    assert directory.hf_config == json.loads((checkpoint / "config.json").read_text())
    assert directory.generation_config["assistant_token_id"] == 196
    assert directory.info().architecture == "BaichuanForCausalLM"
    assert directory.config["build_config"]["max_seq_len"] == 256
    assert directory.config["build_config"]["plugin_config"]["tokens_per_block"] == 32
    assert directory.config["pretrained_config"]["position_embedding_type"] == "rope_gpt_neox"
    assert directory.config["pretrained_config"]["quantization"]["quant_algo"] is None
    assert manifest.options["max_seq_len"] == 256
    assert manifest.source.files == ("config.json", "model.safetensors")
    assert str(tmp_path) not in manifest.to_json()


def test_templates_in_files_of_their_own_come_along(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "c", "llama")
    write_json(checkpoint / "chat_template.json", {"chat_template": "{{ messages }}"})
    (checkpoint / "additional_chat_templates").mkdir()
    (checkpoint / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    build(checkpoint, tmp_path / "e")
    files = TextFiles.read(tmp_path / "e")
    assert (files.chat_template, files.tool_template) == ("{{ messages }}", "{{ tools }}")
    EngineDirectory.open(tmp_path / "e").verify()


def test_two_builds_are_equal_byte_for_byte(checkpoint: Path, tmp_path: Path) -> None:
    build(checkpoint, tmp_path / "one")
    build(checkpoint, tmp_path / "two")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert "manifest.json" in contents(tmp_path / "one")


def test_the_digest_follows_weights_and_options_and_nothing_else(checkpoint: Path, tmp_path: Path) -> None:
    def digest(name: str, source: Path = checkpoint, options: BuildOptions = FLOAT32) -> str:
        return build_engine(source, tmp_path / name, options, target=FakeTarget()).engine_digest

    same_as_bin = make_checkpoint(tmp_path / "bin", "baichuan2-7b", format="bin", with_tokenizer=False)
    other_weights = make_checkpoint(tmp_path / "seed", "baichuan2-7b", seed=1)
    other_eps = make_checkpoint(tmp_path / "eps", "baichuan2-7b", rms_norm_eps=1e-5)
    original = digest("a")
    assert digest("b", same_as_bin) == original
    different = {
        digest("c", other_weights),
        digest("d", other_eps),
        digest("e", options=BuildOptions(dtype="float16")),
        digest("f", options=BuildOptions(dtype="float32", max_batch_size=3)),
        original,
    }
    assert len(different) == 5


def test_progress_counts_every_byte(checkpoint: Path, tmp_path: Path) -> None:
    progress = RecordedProgress()
    build_engine(checkpoint, tmp_path / "e", FLOAT32, progress=progress, target=FakeTarget())
    assert [name for name, _ in progress.phases] == ["compile", "hash the checkpoint", "self-test", "seal"]
    assert progress.expected == [name for name, _ in progress.phases]
    for name, total in progress.phases:
        assert progress.done[name] == total > 0


def test_what_is_hashed_beside_the_build_is_found_wrong_all_the_same(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(self: Checkpoint, progress: object) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Checkpoint, "digest", damaged)
    with pytest.raises(InvalidArgument, match="Input/output error"):
        build(checkpoint, tmp_path / "e")
    assert list(tmp_path.iterdir()) == []


def test_all_problems_of_the_options_come_in_one_message(checkpoint: Path, tmp_path: Path) -> None:
    wrong = BuildOptions(dtype="float31", max_num_tokens=0, max_seq_len=257)
    with pytest.raises(RecipeError) as caught:
        build(checkpoint, tmp_path / "e", wrong)
    for part in ("3 problems", "float31", "max_num_tokens", "257, but the checkpoint was made for at most 256"):
        assert part in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_target_may_refuse(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no such kernel; use another dtype"):
        build(checkpoint, tmp_path / "e", target=FakeTarget(refusals=["no such kernel; use another dtype"]))
    with pytest.raises(RecipeError, match="target must be one of cpu, cuda, tensorrt_llm, got 'tpu'"):
        build_engine(checkpoint, tmp_path / "e", BuildOptions(target="tpu"))


def test_wrong_tensors_and_wrong_options_are_reported_together(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "c", "llama")
    config = json.loads((checkpoint / "config.json").read_text())
    write_json(checkpoint / "config.json", config | {"num_hidden_layers": 3})
    with pytest.raises(CheckpointError) as caught:
        build(checkpoint, tmp_path / "e", BuildOptions(dtype="float31"))
    assert "model.layers.2.mlp.down_proj.weight" in str(caught.value)
    assert "float31" in str(caught.value)
    assert not (tmp_path / "e").exists()


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "c", "llama")
    config = json.loads((checkpoint / "config.json").read_text())
    write_json(checkpoint / "config.json", config | {"architectures": ["GPT5ForCausalLM"], "model_type": "gpt5"})
    with pytest.raises(Unsupported, match="LlamaForCausalLM"):
        build(checkpoint, tmp_path / "e")


def test_tokens_that_read_those_behind_them_make_no_text(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "c", "mistral", is_causal=False)
    with pytest.raises(
        Unsupported, match=r"makes embeddings or scores, not text; put the model's modules.json next to"
    ):
        build(checkpoint, tmp_path / "e")
    write_sentence_transformers(checkpoint, "mean", normalize=True)
    with pytest.raises(Unsupported, match=r"is_causal false .* is not supported with sliding windows"):
        build(checkpoint, tmp_path / "e")


def test_weights_that_overflow_the_dtype_are_refused(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "c", "llama")
    from safetensors.numpy import load_file, save_file

    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.norm.weight"][5] = 1e6
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match="--dtype bfloat16"):
        build(checkpoint, tmp_path / "e", BuildOptions(dtype="float16"))
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    build(checkpoint, tmp_path / "e", BuildOptions(dtype="bfloat16"))


def test_the_checkpoint_itself_is_never_overwritten(checkpoint: Path) -> None:
    before = contents(checkpoint)
    with pytest.raises(AlreadyExists):
        build(checkpoint, checkpoint)
    assert contents(checkpoint) == before


def test_how_long_it_took_is_beside_the_engine_and_not_part_of_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(checkpoint, tmp_path / "e", target=FakeTarget(after_each=lambda name: time.sleep(0.01)))
    assert BUILD_TIME_FILE not in EngineDirectory.open(tmp_path / "e").manifest.files
    took = BuildTime.load(tmp_path / "e")
    assert took is not None
    assert took.here() == took.seconds >= 0.01
    monkeypatch.setattr(build_time, "machine_name", lambda: "another, 64 cores")
    assert took.here() is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"seconds": "soon", "machine": "x"}', '{"seconds": 1}', "[" * 9999])
def test_a_build_time_that_nobody_can_read_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / BUILD_TIME_FILE).write_text(text)
    assert BuildTime.load(tmp_path) is None


def test_a_failing_target_leaves_the_old_engine(checkpoint: Path, tmp_path: Path) -> None:
    build(checkpoint, tmp_path / "e")
    before = contents(tmp_path / "e")

    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(checkpoint, tmp_path / "e", target=FakeTarget(after_each=interrupt))
    assert contents(tmp_path / "e") == before
    assert [path.name for path in tmp_path.iterdir()] == ["e"]


def test_a_full_disk_is_found_before_and_during_the_build(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(name: str) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ResourceExhausted, match="No space left"):
        build(checkpoint, tmp_path / "e", target=FakeTarget(after_each=full))
    usage = shutil._ntuple_diskusage(10, 9, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ResourceExhausted, match=r"needs .* MiB"):
        build(checkpoint, tmp_path / "e")
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_cannot_be_made_is_one_message(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidArgument, match="failed"):
        build(checkpoint, tmp_path / "file" / "e")


def with_tokenizer_code(path: Path, code: str = "") -> Path:
    """A checkpoint whose tokenizer is a file of code that imports another one."""
    make_checkpoint(path, "baichuan2-7b")
    config = json.loads((path / "tokenizer_config.json").read_text())
    write_json(path / "tokenizer_config.json", config | {"auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}})
    (path / "tokenization_x.py").write_text(f"from .pieces import a\n{code}")
    (path / "pieces.py").write_text(code)
    (path / "modeling_x.py").write_text(code)
    return path


def test_code_of_a_tokenizer_is_copied_and_sealed_and_not_run(tmp_path: Path) -> None:
    checkpoint = with_tokenizer_code(tmp_path / "c", f"open({str(tmp_path / 'ran')!r}, 'w')")
    build(checkpoint, tmp_path / "e")
    manifest = EngineDirectory.open(tmp_path / "e").manifest
    assert {name for name in manifest.files if name.endswith(".py")} == {"tokenization_x.py", "pieces.py"}
    assert not (tmp_path / "ran").exists()
    (tmp_path / "e/pieces.py").write_text("import os")
    with pytest.raises(EngineFileError, match=r"pieces\.py"):
        EngineDirectory.open(tmp_path / "e")


def test_code_of_a_tokenizer_that_is_not_there_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = with_tokenizer_code(tmp_path / "c")
    (checkpoint / "pieces.py").unlink()
    build(checkpoint, tmp_path / "e")
    assert "part of the tokenizer's own code (auto_map) is not copied: pieces.py is missing" in caplog.text
    assert (tmp_path / "e/tokenization_x.py").exists()


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
def test_a_tokenizer_that_cannot_be_read_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    checkpoint = make_checkpoint(tmp_path / "c", "llama")
    (checkpoint / name).write_bytes(b"\x00\xff garbage")
    with pytest.raises(CheckpointError, match=f"{name} is not a .*; copy it again"):
        build(checkpoint, tmp_path / "e")
    assert not (tmp_path / "e").exists()
