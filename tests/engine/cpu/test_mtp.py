"""A layer for drafts (`mtp.*`) as an engine beside its network's: what it drafts, and that answers stay as they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.core import GenerateRequest, SamplingParams
from llmserve.engine.cpu.layout import HEADER, OP
from llmserve.engine.cpu.op_codes import OpCode
from llmserve.engine.cpu.runner import CpuRunner
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.open import open_engine
from llmserve.engine.registry import runtime_for
from llmserve.errors import CheckpointError, EngineFileError, InternalError, InvalidArgument, RecipeError, Unsupported
from llmserve.scheduler.drafts.acceptance import Acceptance
from llmserve.scheduler.drafts.drafter import Draftable, Speculation
from llmserve.scheduler.drafts.model_drafter import ModelDrafter
from llmserve.scheduler.plan import Chunk, StepPlan
from tests.checkpoints import make_checkpoint
from tests.engine.cpu.test_engine_file import open_natively, sealed
from tests.engine.cpu.test_state_speculation import Answers, answers, requests_of, settings_of
from tests.mtp import MtpOracle, make_mtp_checkpoint
from tests.oracle import relative_error

OPTIONS = BuildOptions(dtype="float32", tokens_per_block=8, max_num_tokens=64, max_batch_size=8)
KINDS = ("qwen3.5", "qwen3-next-moe", "qwen3.5-moe")
IDS = [(7 * i * i + 3 * i + 5) % 300 + 3 for i in range(30)]
Build = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _drafts_are_four_tokens(monkeypatch: pytest.MonkeyPatch, rows_are_cheap: None) -> None:
    monkeypatch.setattr(Acceptance, "num_likely", lambda drafter, threshold: 4)
    monkeypatch.setattr(ModelDrafter, "goes_on", lambda drafter, threshold: len(drafter.drafted) < 4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Of each kind a folder with `checkpoint`, `engine` and `layer`."""

    @cache
    def built(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        if kind == "agreeing":
            make_mtp_checkpoint(folder / "checkpoint", "qwen3.5", agree, num_hidden_layers=2, tie_word_embeddings=False)
        else:
            make_mtp_checkpoint(folder / "checkpoint", kind)
        build_engine(folder / "checkpoint", folder / "engine", OPTIONS)
        build_engine(folder / "checkpoint", folder / "layer", replace(OPTIONS, drafting_layer=True))
        return folder

    return built


def agree(tensors: dict[str, Any]) -> None:
    """The network is one layer with attention, whose other layer adds nothing; and that for drafts is its copy. It does
    not see the first token, and nothing else is different."""
    embedding = tensors["model.embed_tokens.weight"]
    embedding /= np.sqrt(np.square(embedding).mean(axis=1, keepdims=True))
    for name in ("linear_attn.out_proj", "mlp.down_proj"):
        tensors[f"model.layers.0.{name}.weight"][:] = 0
    for name in [name for name in tensors if name.startswith("model.layers.1.")]:
        tensors[name.replace("model.layers.1", "mtp.layers.0")] = tensors[name].copy()
    tensors["mtp.norm.weight"] = tensors["model.norm.weight"].copy()
    tensors["mtp.pre_fc_norm_embedding.weight"][:] = 0  # plus one
    width = embedding.shape[1]
    tensors["mtp.fc.weight"] = np.eye(width, 2 * width, dtype=np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_logits_are_those_of_torch(folders: Build, kind: str) -> None:
    folder = folders(kind)
    oracle = MtpOracle(folder / "checkpoint")
    hidden = oracle.hidden(IDS)
    rows = hidden[0].numpy()
    found = steps(folder / "engine", IDS, (13, 29, 30), rows.shape[1])
    assert relative_error(np.concatenate([result.hidden for result in found]), rows) < 1e-5
    wanted, made = oracle.drafted(IDS[1:], hidden[:, :-1])
    found = steps(folder / "layer", IDS[1:], (20, 28, 29), rows.shape[1], rows)
    assert relative_error(np.concatenate([result.logits[0] for result in found]), wanted) < 1e-5
    assert relative_error(np.concatenate([result.hidden for result in found]), made[0].numpy()) < 1e-5


def steps(engine: Path, ids: list[int], ends: tuple[int, ...], width: int, hidden: Any = None) -> list[Any]:
    runner = CpuRunner.open(EngineDirectory.open(engine).engine_file, num_blocks=8, handed_out=width)
    found: list[Any] = []
    start = 0
    for end in ends:
        chunk = Chunk(0, ids[start:end], start, range(8), return_logits=True)
        plan = StepPlan((chunk,), None if hidden is None else hidden[start:end])
        found.append(runner.step(plan))
        if not runner.info.num_states:  # there it can be computed again
            without = replace(plan, chunks=(replace(chunk, return_logits=False),))
            again = runner.step(without).hidden
            assert again is not None
            assert np.array_equal(again, found[-1].hidden), "they come without logits, too"
        start = end
    with pytest.raises(InternalError, match="hidden rows"):
        runner.step(replace(plan, hidden=np.zeros((len(chunk.token_ids), width + 1), np.float32)))
    runner.close()
    return found


@pytest.mark.parametrize(
    ("place", "value"),
    [(("output", "width"), 64), (("output", "buffer"), -2), (("rows",), 1), (("inputs", 0, "buffer"), 999)],
)
def test_a_damaged_operation_is_refused(
    place: tuple[str | int, ...], value: int, folders: Build, tmp_path: Path
) -> None:
    good = EngineDirectory.open(folders("qwen3.5") / "layer").engine_file.read_bytes()
    header = np.frombuffer(good, HEADER, 1)[0]
    begin, count = int(header["ops_offset"]), int(header["num_ops"])
    ops = np.frombuffer(good, OP, count, begin).copy()
    index = int(np.flatnonzero(ops["kind"] == OpCode.WITH_HIDDEN)[0])
    *path, field = place
    record: Any = ops[index : index + 1]
    for part in path:
        record = record[part] if isinstance(part, str) else record[:, part]
    record[field] = value
    damaged = tmp_path / "damaged.engine"
    damaged.write_bytes(sealed(bytearray(good[:begin] + ops.tobytes() + good[begin + ops.nbytes :])))
    with pytest.raises(EngineFileError, match=f"damaged record of operation {index}$"):
        open_natively(damaged)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_rounded_layer_passes_its_self_test(folders: Build, quantization: str, tmp_path: Path) -> None:
    """And a network with a rounded head hands out rows that its head does not read as they are."""
    options = replace(OPTIONS, dtype="float16", quantization=quantization)
    for name, is_layer in {"engine": False, "layer": True}.items():
        manifest = build_engine(
            folders("qwen3.5") / "checkpoint", tmp_path / name, replace(options, drafting_layer=is_layer)
        )
        result = runtime_for("cpu").selftest(EngineDirectory.open(tmp_path / name))
        assert result is not None
        assert result.passed, result
        assert (manifest.loss is None) is is_layer
    wanted = runs(tmp_path / "engine", None)
    assert runs(tmp_path / "engine", tmp_path / "layer")[0] == wanted[0]


def runs(
    engine: Path, layer: Path | None, requests: Mapping[str, GenerateRequest] | None = None
) -> tuple[Answers, Any]:
    settings = settings_of(Speculation.DRAFT if layer else Speculation.OFF, layer)
    return answers(open_engine(engine, settings), requests or free_requests())


def free_requests() -> dict[str, GenerateRequest]:
    sampling = SamplingParams(max_tokens=24, temperature=0.0)
    prompts = {"long": IDS, "short": IDS[:2], "other": [*IDS[:17], 9, 8, 7], "one": [5], "longer": (IDS * 6)[:170]}
    return {
        name: GenerateRequest(name, tuple(prompt), sampling, return_log_probs=True) for name, prompt in prompts.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_without_it(folders: Build, kind: str) -> None:
    """With as few blocks as make some give way to others, and prompts that begin alike."""
    folder = folders(kind)
    requests = requests_of(folder / "engine")
    wanted, _ = runs(folder / "engine", None, requests)
    found, stats = runs(folder / "engine", folder / "layer", requests)
    assert found == wanted
    assert (stats.total_drafted_tokens or 0) > (stats.total_accepted_tokens or 0)
    assert stats.free_num_states == stats.max_num_states


def test_drafts_are_those_of_torch(folders: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the network's rows, then of its own."""
    folder = folders("qwen3.5")
    oracle, propose = MtpOracle(folder / "checkpoint"), ModelDrafter.propose
    proposed: list[tuple[list[int], list[int]]] = []

    def recorded(drafter: ModelDrafter, sequence: Draftable, threshold: float) -> Any:
        drafted = propose(drafter, sequence, threshold)
        proposed.append((sequence.token_ids.tolist(), list(drafted)))
        return drafted

    monkeypatch.setattr(ModelDrafter, "propose", recorded)
    requests = free_requests()
    runs(folder / "engine", folder / "layer", {name: requests[name] for name in ("long", "short", "longer")})
    compared = [(known, drafted) for known, drafted in proposed if len(drafted) == 4][::5]
    assert len(compared) > 10
    assert all(drafted == oracle.drafts(known, 4) for known, drafted in compared)


def test_drafts_of_a_layer_that_agrees_are_drawn(folders: Build) -> None:
    """So the layer has read the prompts, also those that the engine has found in its cache. Where they are long, the
    first token, which it does not see, does not matter."""
    folder = folders("agreeing")
    requests = free_requests()
    requests = {name: requests[name] for name in ("long", "other", "longer")}
    wanted, without = runs(folder / "engine", None, requests)
    found, stats = runs(folder / "engine", folder / "layer", requests)
    assert found == wanted
    assert stats.iteration < without.iteration / 2
    assert (stats.total_accepted_tokens or 0) > 0.9 * (stats.total_drafted_tokens or 0)


def test_its_head_may_have_few_tokens(folders: Build, tmp_path: Path) -> None:
    folder, requests = folders("agreeing"), free_requests()
    wanted, without = runs(folder / "engine", None, requests)
    path, answered = tmp_path / "texts.jsonl", cast(Any, wanted)
    tokens = {token for told in answered.values() for pairs, *_ in told for token, _ in pairs}
    path.write_text(json.dumps({"prompt_ids": sorted(tokens)}))
    options = replace(OPTIONS, drafting_layer=True, given={"draft_vocabulary": str(path)})
    build_engine(folder / "checkpoint", tmp_path / "layer", options)
    found, stats = runs(folder / "engine", tmp_path / "layer", requests)
    assert found == wanted
    assert stats.iteration < without.iteration
    assert (stats.total_accepted_tokens or 0) > 0.5 * (stats.total_drafted_tokens or 0)


def test_what_cannot_draft_is_refused(folders: Build, tmp_path: Path) -> None:
    folder = folders("qwen3.5")
    with pytest.raises(Unsupported, match="is a layer for drafts; give it to --draft-engine"):
        open_engine(folder / "layer")
    with pytest.raises(InvalidArgument, match=r"the layer for drafts of a Qwen3_5Moe.* with rows of 64 numbers, but"):
        open_engine(folder / "engine", settings_of(Speculation.DRAFT, folders("qwen3.5-moe") / "layer"))
    layer = replace(OPTIONS, drafting_layer=True)
    with pytest.raises(CheckpointError, match=r"mtp\.fc\.weight"):
        build_engine(make_checkpoint(tmp_path / "without", "qwen3.5"), tmp_path / "x", layer)
    with pytest.raises(Unsupported, match="LlamaForCausalLM has no supported layer for drafts"):
        build_engine(make_checkpoint(tmp_path / "llama", "llama"), tmp_path / "x", layer)
    two = make_mtp_checkpoint(tmp_path / "two", "qwen3.5", mtp_num_hidden_layers=2, mtp_use_dedicated_embeddings=True)
    with pytest.raises(CheckpointError, match=r"(?s)mtp_num_hidden_layers is 2.*mtp_use_dedicated_embeddings"):
        build_engine(two, tmp_path / "x", layer)
    calibrated = replace(layer, quantization="int8", calibration_data="texts.jsonl")
    with pytest.raises(RecipeError, match="no effect on a drafting_layer"):
        build_engine(folder / "checkpoint", tmp_path / "x", calibrated)
