"""The shipped model repository as data: what a config says must fit the configs that it refers to."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

PIPELINES = Path(__file__).resolve().parents[2] / "pipelines"
EMBEDDINGS = PIPELINES.with_name("pipelines-embeddings")
MODELS = ("ensemble", "postprocessing", "preprocessing", "tensorrt_llm")
FOLDERS = [*((PIPELINES, model) for model in MODELS), *((EMBEDDINGS, model) for model in MODELS if model != MODELS[1])]


def read(model: str, repository: Path = PIPELINES) -> ModelConfig:
    return text_format.Parse((repository / model / "config.pbtxt").read_text(), ModelConfig())


def types(tensors: object) -> dict[str, int]:
    return {tensor.name: tensor.data_type for tensor in tensors}  # type: ignore[attr-defined]


def test_the_repository_has_the_four_models_and_nothing_else() -> None:
    assert tuple(sorted(path.name for path in PIPELINES.iterdir())) == MODELS
    assert sorted(EMBEDDINGS.iterdir()) == [repository / model for repository, model in FOLDERS[len(MODELS) :]]
    assert all((repository / model / "1").is_dir() for repository, model in FOLDERS)


@pytest.mark.parametrize(("repository", "model"), FOLDERS)
def test_a_config_is_static_named_as_its_folder_and_declares_each_tensor_once(repository: Path, model: str) -> None:
    assert "${" not in (repository / model / "config.pbtxt").read_text()
    config = read(model, repository)
    assert config.name == model
    assert config.max_batch_size == 64
    for tensors in (config.input, config.output):
        assert [name for name, count in Counter(tensor.name for tensor in tensors).items() if count > 1] == []
    assert all(tensor.data_type and tensor.dims for tensor in (*config.input, *config.output))
    assert all(
        reshape.reshape.shape == [] and reshape.dims == [1] for reshape in config.input if reshape.HasField("reshape")
    )


@pytest.mark.parametrize("repository", [PIPELINES, EMBEDDINGS])
def test_every_mapping_of_the_ensemble_joins_tensors_of_one_type(repository: Path) -> None:
    ensemble = read("ensemble", repository)
    known = types(ensemble.input)
    for step in ensemble.ensemble_scheduling.step:
        model = read(step.model_name, repository)
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


# Every tensor of tensorrtllm_backend v0.7.1 and r25.05, both generations together.
CONTRACT_INPUTS = {
    "ensemble": """
        text_input decoder_text_input max_tokens num_return_sequences bad_words stop_words exclude_input_in_output
        end_id pad_id top_k top_p temperature length_penalty repetition_penalty min_length min_tokens presence_penalty
        frequency_penalty random_seed seed return_log_probs return_context_logits return_generation_logits
        return_perf_metrics beam_width stream prompt_embedding_table prompt_table_extra_id prompt_vocab_size
        embedding_bias_words embedding_bias_weights lora_task_id lora_weights lora_config guided_decoding_guide_type
        guided_decoding_guide""",
    "preprocessing": """
        QUERY DECODER_QUERY IMAGE_BYTES IMAGE_URL VIDEO_BYTES REQUEST_OUTPUT_LEN BAD_WORDS_DICT STOP_WORDS_DICT
        EMBEDDING_BIAS_WORDS EMBEDDING_BIAS_WEIGHTS END_ID PAD_ID PROMPT_TABLE_EXTRA_ID""",
    "tensorrt_llm": """
        input_ids encoder_input_features encoder_output_lengths input_lengths request_output_len num_return_sequences
        draft_input_ids decoder_input_ids decoder_input_lengths draft_logits draft_acceptance_threshold end_id pad_id
        stop_words_list bad_words_list embedding_bias beam_width temperature runtime_top_k runtime_top_p
        runtime_top_p_min runtime_top_p_decay runtime_top_p_reset_ids len_penalty early_stopping repetition_penalty
        min_length min_tokens beam_search_diversity_rate presence_penalty frequency_penalty random_seed seed
        return_log_probs return_context_logits return_generation_logits return_perf_metrics exclude_input_in_output
        stop streaming prompt_embedding_table prompt_table_extra_ids prompt_vocab_size cross_attention_mask
        mrope_rotary_cos_sin mrope_position_deltas lora_task_id lora_weights lora_config context_phase_params
        skip_cross_attn_blocks retention_token_range_starts retention_token_range_ends
        retention_token_range_priorities retention_token_range_durations_ms retention_decode_priority
        retention_decode_duration_ms guided_decoding_guide_type guided_decoding_guide lookahead_window_size
        lookahead_ngram_size lookahead_verification_set_size""",
    "postprocessing": "TOKENS_BATCH SEQUENCE_LENGTH CUM_LOG_PROBS OUTPUT_LOG_PROBS",
}
NUMBERS = """
    cum_log_probs output_log_probs context_logits generation_logits batch_index sequence_index
    kv_cache_alloc_new_blocks kv_cache_reused_blocks kv_cache_alloc_total_blocks arrival_time_ns
    first_scheduled_time_ns first_token_time_ns last_token_time_ns acceptance_rate total_accepted_draft_tokens
    total_draft_tokens"""
CONTRACT_OUTPUTS = {
    "ensemble": "text_output" + NUMBERS,
    "preprocessing": """
        INPUT_ID REQUEST_INPUT_LEN DECODER_INPUT_ID REQUEST_DECODER_INPUT_LEN BAD_WORDS_IDS STOP_WORDS_IDS
        EMBEDDING_BIAS REQUEST_OUTPUT_LEN OUT_END_ID OUT_PAD_ID OUT_PROMPT_TABLE_EXTRA_IDS PIXEL_VALUES
        ASPECT_RATIO_IDS ASPECT_RATIO_MASK CROSS_ATTENTION_MASK IMAGE_SIZES IS_VIDEO_INPUT ATTENTION_MASK
        IMAGE_GRID_THW VISION_INPUT_ID""",
    "tensorrt_llm": "output_ids sequence_length context_phase_params" + NUMBERS,
    "postprocessing": "OUTPUT OUT_CUM_LOG_PROBS OUT_OUTPUT_LOG_PROBS",
}
NOT_DECLARED = {
    # Images and videos: no model here takes them, and no ensemble input leads to them.
    *("IMAGE_BYTES", "IMAGE_URL", "VIDEO_BYTES", "PIXEL_VALUES", "ASPECT_RATIO_IDS", "ASPECT_RATIO_MASK"),
    *("CROSS_ATTENTION_MASK", "IMAGE_SIZES", "IS_VIDEO_INPUT", "ATTENTION_MASK", "IMAGE_GRID_THW", "VISION_INPUT_ID"),
    # What an encoder-decoder model and prompt tables get from preprocessing: their inputs are refused there.
    *("DECODER_INPUT_ID", "REQUEST_DECODER_INPUT_LEN", "OUT_PROMPT_TABLE_EXTRA_IDS"),
    # v0.7.1 led log-probs through postprocessing; since then they come from tensorrt_llm directly, as here.
    *("CUM_LOG_PROBS", "OUTPUT_LOG_PROBS", "OUT_CUM_LOG_PROBS", "OUT_OUTPUT_LOG_PROBS"),
}
STATE_OUTPUTS = {"context_phase_params"}  # the state handed from a prefill server to a decode server: there is none


@pytest.mark.parametrize("model", MODELS)
def test_inputs_of_both_contract_generations_are_declared(model: str) -> None:
    assert set(CONTRACT_INPUTS[model].split()) - set(types(read(model).input)) <= NOT_DECLARED


@pytest.mark.parametrize("model", MODELS)
def test_outputs_of_both_contract_generations_are_declared(model: str) -> None:
    missing = set(CONTRACT_OUTPUTS[model].split()) - set(types(read(model).output))
    assert missing <= NOT_DECLARED | STATE_OUTPUTS


def test_our_own_tensors_are_declared_too() -> None:
    own = {"finish_reason", "num_prompt_tokens", "num_cached_tokens", "num_completion_tokens"}
    assert own <= set(types(read("ensemble").output)) & set(types(read("tensorrt_llm").output))
    assert {"messages", "min_p", "stop"} <= set(types(read("ensemble").input))


def test_the_exceptions_are_none_that_is_declared_by_now() -> None:
    declared = {name for model in MODELS for name in (*types(read(model).input), *types(read(model).output))}
    assert declared.isdisjoint(NOT_DECLARED)


def test_shims_are_thin_and_import_only_triton_and_what_does_the_work() -> None:
    shims = sorted(PIPELINES.rglob("*.py"))
    assert [path.parent.parent.name for path in shims] == ["postprocessing", "preprocessing", "tensorrt_llm"]
    workers = ("llmserve.stages.", "llmserve.backends.tensorrtllm.")
    for path in shims:
        source = path.read_text()
        assert len(source.splitlines()) <= 40
        imported = {
            getattr(node, "module", None) or node.names[0].name
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        assert all(n in ("triton_python_backend_utils", "llmserve.errors") or n.startswith(workers) for n in imported)
