"""The shipped model repository as data: what a config says must fit the configs that it refers to."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

PIPELINES = Path(__file__).resolve().parents[2] / "pipelines"
MODELS = ("ensemble", "postprocessing", "preprocessing", "tensorrt_llm")


def read(model: str) -> ModelConfig:
    return text_format.Parse((PIPELINES / model / "config.pbtxt").read_text(), ModelConfig())


def types(tensors: object) -> dict[str, int]:
    return {tensor.name: tensor.data_type for tensor in tensors}  # type: ignore[attr-defined]


def test_the_repository_has_the_four_models_and_nothing_else() -> None:
    assert tuple(sorted(path.name for path in PIPELINES.iterdir())) == MODELS
    assert all((PIPELINES / model / "1").is_dir() for model in MODELS)


@pytest.mark.parametrize("model", MODELS)
def test_a_config_is_static_named_as_its_folder_and_declares_each_tensor_once(model: str) -> None:
    assert "${" not in (PIPELINES / model / "config.pbtxt").read_text()
    config = read(model)
    assert config.name == model
    assert config.max_batch_size == 64
    for tensors in (config.input, config.output):
        assert [name for name, count in Counter(tensor.name for tensor in tensors).items() if count > 1] == []
    assert all(tensor.data_type and tensor.dims for tensor in (*config.input, *config.output))
    assert all(
        reshape.reshape.shape == [] and reshape.dims == [1] for reshape in config.input if reshape.HasField("reshape")
    )


def test_every_mapping_of_the_ensemble_joins_tensors_of_one_type() -> None:
    ensemble = read("ensemble")
    known = types(ensemble.input)
    for step in ensemble.ensemble_scheduling.step:
        model = read(step.model_name)
        inputs, outputs = types(model.input), types(model.output)
        for tensor, source in step.input_map.items():
            assert known[source] == inputs[tensor], (step.model_name, tensor, source)
        for tensor, target in step.output_map.items():
            assert target not in known, f"{target} is produced twice"
            known[target] = outputs[tensor]
        required = {tensor.name for tensor in model.input if not tensor.optional}
        assert required <= set(step.input_map), step.model_name
    assert {name: known.get(name) for name in types(ensemble.output)} == types(ensemble.output)


def test_every_input_of_the_ensemble_reaches_a_step() -> None:
    ensemble = read("ensemble")
    used = {source for step in ensemble.ensemble_scheduling.step for source in step.input_map.values()}
    assert set(types(ensemble.input)) <= used


def test_dims_agree_along_the_mappings() -> None:
    ensemble = read("ensemble")
    dims = {tensor.name: list(tensor.dims) for tensor in ensemble.input}
    for step in ensemble.ensemble_scheduling.step:
        model = read(step.model_name)
        for tensor in model.input:
            if (source := step.input_map.get(tensor.name)) is not None:
                assert len(dims[source]) == len(tensor.dims), (step.model_name, tensor.name)
        dims |= {step.output_map[out.name]: list(out.dims) for out in model.output if out.name in step.output_map}


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("ensemble", "text_input max_tokens bad_words stop_words end_id pad_id top_k top_p temperature length_penalty"),
        ("ensemble", "repetition_penalty min_length min_tokens presence_penalty frequency_penalty random_seed seed"),
        ("ensemble", "return_log_probs beam_width stream num_return_sequences exclude_input_in_output messages stop"),
        ("preprocessing", "QUERY REQUEST_OUTPUT_LEN BAD_WORDS_DICT STOP_WORDS_DICT END_ID PAD_ID MESSAGES"),
        ("tensorrt_llm", "input_ids input_lengths request_output_len stop_words_list embedding_bias runtime_top_k"),
        ("tensorrt_llm", "min_length min_tokens random_seed seed streaming stop draft_input_ids lora_weights"),
        ("postprocessing", "TOKENS_BATCH SEQUENCE_LENGTH"),
    ],
)
def test_inputs_of_both_contract_generations_are_declared(model: str, names: str) -> None:
    assert set(names.split()) <= set(types(read(model).input))


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("ensemble", "text_output cum_log_probs output_log_probs batch_index sequence_index finish_reason"),
        ("ensemble", "kv_cache_reused_blocks arrival_time_ns acceptance_rate num_prompt_tokens num_completion_tokens"),
        (
            "preprocessing",
            "INPUT_ID REQUEST_INPUT_LEN BAD_WORDS_IDS STOP_WORDS_IDS EMBEDDING_BIAS OUT_END_ID OUT_PAD_ID",
        ),
        ("tensorrt_llm", "output_ids sequence_length cum_log_probs output_log_probs"),
        ("postprocessing", "OUTPUT"),
    ],
)
def test_outputs_of_the_contract_are_declared(model: str, names: str) -> None:
    assert set(names.split()) <= set(types(read(model).output))


def test_shims_are_thin_and_import_only_triton_and_the_stages() -> None:
    shims = sorted(PIPELINES.rglob("*.py"))
    assert [path.parent.parent.name for path in shims] == ["postprocessing", "preprocessing"]
    for path in shims:
        source = path.read_text()
        assert len(source.splitlines()) <= 40
        imported = {
            getattr(node, "module", None) or node.names[0].name
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        assert all(
            n in ("triton_python_backend_utils", "llmserve.errors") or n.startswith("llmserve.stages.")
            for n in imported
        )
