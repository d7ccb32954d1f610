"""Every family with an adapter in all of its linear layers computes what PEFT computes, merged and beside an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmserve.builder.adapter import build_adapter
from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.builder.reference import ReferenceModel
from llmserve.checkpoint.adapters.adapted import open_checkpoint
from llmserve.checkpoint.plan import plan_weights
from llmserve.engine.adapters.sealed import AdapterPart, SealedAdapter
from llmserve.engine.cpu.runner import CpuRunner
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.directory.selftest import SelfTest
from llmserve.errors import CheckpointError
from llmserve.models.registry import architecture_for
from llmserve.scheduler.plan import StepPlan
from tests.adapters import adapted, linear_modules, save_adapter
from tests.checkpoints import KINDS, WITH_STATES, make_checkpoint
from tests.engine.cpu.networks import prefill
from tests.oracle import load_oracle, oracle_logits, relative_error

IDS = [1, 70, 35, 190, 17, 101, 44, 17, 260, 9]
OPTIONS = BuildOptions(dtype="float32", max_seq_len=64, max_num_tokens=64, max_batch_size=4)
MLP = ("gate_proj", "up_proj", "down_proj")
LEFT_OUT = {  # linear layers of a network that its adapter does not have
    kind: modules
    for kinds, modules in {
        # PEFT takes these names for those of the experts, whose tensors we refuse (`target_parameters`)
        "cohere2-moe dots1-moe ernie4.5-moe exaone-moe glm4-moe hunyuan-moe mellum-moe": MLP,
        "flex-olmo-moe qwen3-moe qwen3-next-moe solar-open-moe": MLP,
        "afmoe": (*MLP, "gate"),
        "llama4-moe phimoe": ("router",),  # it returns a tuple, which PEFT cannot adapt
        "falcon-h1 nemotron-h nemotron-h-moe": ("out_proj",),  # PEFT refuses it by name
    }.items()
    for kind in kinds.split()
}  # fmt: skip
FACTORS = ("q_b_proj", "kv_b_proj", "o_proj")  # whose products an engine has
LEFT_OUT["deepseek-v2-moe"] = ("gate_proj", "up_proj", "down_proj", "q_proj", "kv_b_proj", "o_proj")
LEFT_OUT |= dict.fromkeys(("deepseek-v3-moe", "glm4-lite-moe"), ("gate_proj", "up_proj", "down_proj", *FACTORS))
SAME_MODULES = ("baichuan1-7b", "llama3-rope", "phi4-mini", "granite4-h")  # as another kind of the architecture


def reference_logits(
    folder: Path, *, merged: Path | None = None, parts: Sequence[AdapterPart] = ()
) -> NDArray[np.float32]:
    with open_checkpoint(folder, merged) as checkpoint:
        architecture = architecture_for(checkpoint.config)
        spec = architecture.from_hf(checkpoint.config)
        plan = plan_weights(checkpoint, architecture.params(spec), architecture.ignored)
        program = architecture.program(spec)
        return ReferenceModel(program, lambda name: plan.load(name, "float32"), adapter=parts).logits(IDS)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in SAME_MODULES])
def test_families_compute_what_peft_computes(kind: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "c", kind, with_tokenizer=False)
    network = load_oracle(folder)
    plain = oracle_logits(network, IDS)
    modules = linear_modules(network).difference(LEFT_OUT.get(kind, ()))
    model = adapted(network, target_modules=sorted(modules), rank_pattern={"o_proj": 3}, use_rslora=True, lora_alpha=3)
    save_adapter(model, tmp_path / "a")
    wanted, bound = oracle_logits(model, IDS), 1e-4 if kind in WITH_STATES else 1e-5
    assert relative_error(plain, wanted) > 1e-2, "the adapter should be visible"
    assert relative_error(reference_logits(folder, merged=tmp_path / "a"), wanted) < bound
    build_engine(folder, tmp_path / "e", OPTIONS)
    assert build_adapter(tmp_path / "a", tmp_path / "e", tmp_path / "s").rank == 4
    sealed = SealedAdapter.open(tmp_path / "s")
    assert relative_error(reference_logits(folder, parts=sealed.read()), wanted) < bound
    runner = CpuRunner.open(EngineDirectory.open(tmp_path / "e").engine_file, num_blocks=8, threads=1)
    try:
        runner.load_adapter(1, runner.packed(sealed))
        step = StepPlan((replace(prefill(runner, IDS), adapter=1),))
        assert relative_error(runner.step(step).logits[0], wanted) < bound
    finally:
        runner.close()
    selftest = SelfTest.load(tmp_path / "s/selftest.npz")
    *_, longest = selftest.prompts()
    assert relative_error(selftest.logits[-4:], oracle_logits(model, longest)[-4:]) < bound


def test_adapters_of_products_can_be_merged_only(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "c", "deepseek-v3-moe", with_tokenizer=False)
    model = adapted(load_oracle(folder), target_modules=list(FACTORS))
    save_adapter(model, tmp_path / "a")
    wanted = oracle_logits(model, IDS)
    assert relative_error(reference_logits(folder), wanted) > 1e-2, "the adapter should be visible"
    assert relative_error(reference_logits(folder, merged=tmp_path / "a"), wanted) < 1e-5
    build_engine(folder, tmp_path / "e", OPTIONS)
    with pytest.raises(CheckpointError, match=r"o_proj.weight, which is part of a product in the engine; merge"):
        build_adapter(tmp_path / "a", tmp_path / "e", tmp_path / "s")
