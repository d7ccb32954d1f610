"""`llmserve export triton`: what is written. That servers run it is tested in tests/compat/test_exported_engine.py."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.builder.triton_repository import TritonBackend, TritonExport
from llmserve.cli.pipelines import packaged_repository
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.errors import AlreadyExists, Unsupported
from tests.engine.directories import MANIFEST, make_engine_directory, seal
from tests.engine.tensorrt_llm.conftest import Build
from tests.pipelines.test_repository import MODELS

# The parameters of all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt, release 25.05, and one that only its code
# reads (recv_poll_period_ms).
CONTRACT_PARAMETERS = """
    max_beam_width FORCE_CPU_ONLY_INPUT_TENSORS gpt_model_type gpt_model_path encoder_model_path
    max_tokens_in_paged_kv_cache max_attention_window_size sink_token_length batch_scheduler_policy
    kv_cache_free_gpu_mem_fraction cross_kv_cache_fraction kv_cache_host_memory_bytes kv_cache_onboard_blocks
    exclude_input_in_output cancellation_check_period_ms stats_check_period_ms iter_stats_max_iterations
    request_stats_max_iterations enable_kv_cache_reuse normalize_log_probs enable_chunked_context gpu_device_ids
    participant_ids num_nodes lora_cache_optimal_adapter_size lora_cache_max_adapter_size
    lora_cache_gpu_memory_fraction lora_cache_host_memory_bytes lora_prefetch_dir decoding_mode executor_worker_path
    lookahead_window_size lookahead_ngram_size lookahead_verification_set_size medusa_choices eagle_choices
    gpu_weights_percent enable_context_fmha_fp32_acc multi_block_mode cuda_graph_mode cuda_graph_cache_size
    speculative_decoding_fast_logits tokenizer_dir guided_decoding_backend xgrammar_tokenizer_info_path
    recv_poll_period_ms"""
LEFT_OUT = {  # unset means something, or the feature is not there
    "encoder_model_path": "no encoder",
    "max_tokens_in_paged_kv_cache": "as many as kv_cache_free_gpu_mem_fraction has room for",
    "max_attention_window_size": "max_seq_len",
    "sink_token_length": "none",
    "gpu_device_ids": "the first ones",
    "participant_ids": "one rank a process, in order",
    "lora_prefetch_dir": "none",
    "medusa_choices": "no speculative decoding",
    "eagle_choices": "no speculative decoding",
    "lookahead_window_size": "no speculative decoding",
    "lookahead_ngram_size": "no speculative decoding",
    "lookahead_verification_set_size": "no speculative decoding",
}
# Of ours and of v0.7.1: not in the contract of 25.05.
NOT_IN_CONTRACT = {
    "stop_words", "min_p", "min_length", "random_seed", "window_ids", "tail_text", "finish_reason",
    "num_prompt_tokens", "num_cached_tokens", "num_completion_tokens", "prompt_warning", "warning",
    "return_receipt", "receipt",
}  # fmt: skip
LEFT_OUT = {  # unset means something, or the feature is not there
    "encoder_model_path": "no encoder",
    "max_tokens_in_paged_kv_cache": "as many as kv_cache_free_gpu_mem_fraction has room for",
    "max_attention_window_size": "max_seq_len",
    "sink_token_length": "none",
    "gpu_device_ids": "the first ones",
    "participant_ids": "one rank a process, in order",
    "lora_prefetch_dir": "none",
    "medusa_choices": "no speculative decoding",
    "eagle_choices": "no speculative decoding",
    "lookahead_window_size": "no speculative decoding",
    "lookahead_ngram_size": "no speculative decoding",
    "lookahead_verification_set_size": "no speculative decoding",
}
GPU = {"mode": "engine", "tensorrt_llm": "1.2.1", "compute_capability": "9.0", "gpu": "NVIDIA H100", "world_size": 1}


@pytest.fixture
def engine(tmp_path: Path) -> EngineDirectory:
    files = {"tokenizer.model": b"pieces", "tokenizer_config.json": b"{}", "hf_config.json": b"{}"}
    return EngineDirectory.open(make_engine_directory(tmp_path / "engine", files))


@pytest.fixture
def compiled(engine: EngineDirectory) -> EngineDirectory:
    return for_gpu(engine)


def for_gpu(engine: EngineDirectory, **device: object) -> EngineDirectory:
    seal(engine.path, replace(MANIFEST, target="tensorrt_llm", device=GPU | device))
    return EngineDirectory.open(engine.path)


def export(engine: EngineDirectory, output: Path, **options: object) -> Path:
    TritonExport(engine, packaged_repository(), output, **options).write()  # type: ignore[arg-type]
    return output


def config(repository: Path, model: str) -> ModelConfig:
    return text_format.Parse((repository / model / "config.pbtxt").read_text(), ModelConfig())


def parameter(repository: Path, model: str, key: str) -> str:
    return str(config(repository, model).parameters[key].string_value)


def names(tensors: object) -> set[str]:
    return {tensor.name for tensor in tensors}  # type: ignore[attr-defined]


def test_each_model_has_below_its_own_directory_what_it_reads(engine: EngineDirectory, tmp_path: Path) -> None:
    repository = export(engine, tmp_path / "out/models")
    assert tuple(sorted(path.name for path in repository.iterdir())) == MODELS
    assert config(repository, "tensorrt_llm").backend == "python"
    assert parameter(repository, "tensorrt_llm", "gpt_model_path") == "$$TRITON_MODEL_DIRECTORY/1/engine"
    assert EngineDirectory.open(repository / "tensorrt_llm/1/engine").manifest == engine.manifest
    for model in ("preprocessing", "postprocessing"):
        assert parameter(repository, model, "tokenizer_dir") == "$$TRITON_MODEL_DIRECTORY/1/tokenizer"
        found = {path.name for path in (repository / model / "1/tokenizer").iterdir()}
        assert found == {"tokenizer.model", "tokenizer_config.json", "hf_config.json", "config.json"}
    assert engine.manifest.engine_digest in (repository / "ensemble/config.pbtxt").read_text()


def test_without_a_copy_the_configs_name_the_engine(engine: EngineDirectory, tmp_path: Path) -> None:
    repository = export(engine, tmp_path / "models", self_contained=False)
    files = sorted(path.relative_to(repository).as_posix() for path in repository.rglob("*") if path.is_file())
    shims = [f"{model}/1/model.py" for model in MODELS if model != "ensemble"]
    assert files == sorted([*(f"{model}/config.pbtxt" for model in MODELS), *shims])
    assert parameter(repository, "tensorrt_llm", "gpt_model_path") == str(engine.path)
    assert parameter(repository, "postprocessing", "tokenizer_dir") == str(engine.path)


def test_what_is_there_is_never_replaced(engine: EngineDirectory, tmp_path: Path) -> None:
    other = make_engine_directory(tmp_path / "other")
    for output in (other, engine.path, engine.path / "config.json"):
        with pytest.raises(AlreadyExists, match="choose another --output"):
            export(engine, output)
    assert EngineDirectory.open(other)
    (tmp_path / "empty").mkdir()
    export(engine, tmp_path / "empty")


def test_the_compiled_backend_gets_the_contract_of_its_release(compiled: EngineDirectory, tmp_path: Path) -> None:
    repository = export(compiled, tmp_path / "models", backend=TritonBackend.TENSORRTLLM)
    model, ensemble = config(repository, "tensorrt_llm"), config(repository, "ensemble")
    assert model.backend == "tensorrtllm"
    assert not (repository / "tensorrt_llm/1/model.py").exists()
    assert model.model_transaction_policy.decoupled
    tensors = names(model.input) | names(model.output)
    assert tensors.isdisjoint(NOT_IN_CONTRACT)
    assert {"input_ids", "streaming", "stop", "seed", "context_phase_params"} <= tensors
    assert names(ensemble.input).isdisjoint(NOT_IN_CONTRACT - {"stop_words"})
    assert names(ensemble.output).isdisjoint(NOT_IN_CONTRACT)
    assert {"text_input", "stop_words", "max_tokens", "messages"} <= names(ensemble.input)


def test_the_ensemble_of_the_compiled_backend_is_whole(compiled: EngineDirectory, tmp_path: Path) -> None:
    """What tritonserver checks at load: every mapped tensor exists, and every ensemble tensor is used."""
    repository = export(compiled, tmp_path / "models", backend=TritonBackend.TENSORRTLLM)
    ensemble = config(repository, "ensemble")
    known, used = names(ensemble.input), set()
    for step in ensemble.ensemble_scheduling.step:
        model = config(repository, step.model_name)
        assert set(step.input_map) <= names(model.input)
        assert set(step.output_map) <= names(model.output)
        assert {tensor.name for tensor in model.input if not tensor.optional} <= set(step.input_map)
        assert set(step.input_map.values()) <= known
        used |= set(step.input_map.values())
        known |= set(step.output_map.values())
    assert names(ensemble.input) <= used
    assert names(ensemble.output) <= known <= used | names(ensemble.output)


def test_every_parameter_of_the_compiled_backend_is_filled_in_or_left_out_for_a_reason(
    compiled: EngineDirectory, tmp_path: Path
) -> None:
    repository = export(compiled, tmp_path / "models", backend=TritonBackend.TENSORRTLLM)
    given = {key: entry.string_value for key, entry in config(repository, "tensorrt_llm").parameters.items()}
    assert given.keys() | LEFT_OUT.keys() == set(CONTRACT_PARAMETERS.split())
    assert given.keys().isdisjoint(LEFT_OUT)
    assert not [key for key, value in given.items() if "$" in value]
    assert given["gpt_model_path"] == str(repository / "tensorrt_llm/1/engine")


def test_the_compiled_backend_finds_the_engine_where_the_repository_is_mounted(
    compiled: EngineDirectory, tmp_path: Path
) -> None:
    backend = TritonBackend.TENSORRTLLM
    mounted = export(compiled, tmp_path / "one", backend=backend, mounted_at=Path("/models"))
    assert parameter(mounted, "tensorrt_llm", "gpt_model_path") == "/models/tensorrt_llm/1/engine"
    named = export(compiled, tmp_path / "two", backend=backend, self_contained=False)
    assert parameter(named, "tensorrt_llm", "gpt_model_path") == str(compiled.path)


def test_the_compiled_backend_runs_compiled_engines_only(engine: EngineDirectory, tmp_path: Path) -> None:
    for wrong in (engine, for_gpu(engine, mode="llm")):
        with pytest.raises(Unsupported, match="leave out the flag"):
            export(wrong, tmp_path / "models", backend=TritonBackend.TENSORRTLLM)
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    ("kind", "beam_width", "expected"),
    [
        ("llama", 1, {"decoding_mode": "top_k_top_p", "enable_chunked_context": "true", "max_beam_width": "1"}),
        ("llama", 4, {"decoding_mode": "beam_search", "enable_chunked_context": "true", "max_beam_width": "4"}),
        ("llama", 1, {"enable_kv_cache_reuse": "true"}),
        ("baichuan2-13b", 1, {"decoding_mode": "top_k_top_p", "enable_chunked_context": "false"}),
        ("baichuan2-13b", 1, {"enable_kv_cache_reuse": "false"}),
    ],
)
def test_parameters_follow_from_what_the_target_has_built(
    build: Build, tmp_path: Path, kind: str, beam_width: int, expected: dict[str, str]
) -> None:
    engine = EngineDirectory.open(build("1.2", kind, max_beam_width=beam_width))
    repository = export(engine, tmp_path / "models", backend=TritonBackend.TENSORRTLLM)
    assert (
        expected.items()
        <= {key: entry.string_value for key, entry in config(repository, "tensorrt_llm").parameters.items()}.items()
    )
    engine_files = {path.name for path in (repository / "tensorrt_llm/1/engine").iterdir()}
    assert {"config.json", "rank0.engine"} <= engine_files


def test_an_engine_in_llm_mode_goes_behind_the_python_backend(build: Build, tmp_path: Path) -> None:
    engine = EngineDirectory.open(build("1.3"))
    with pytest.raises(Unsupported, match="in llm mode"):
        export(engine, tmp_path / "models", backend=TritonBackend.TENSORRTLLM)
    repository = export(engine, tmp_path / "models")
    assert EngineDirectory.open(repository / "tensorrt_llm/1/engine").manifest == engine.manifest


def test_a_missing_file_leaves_nothing(engine: EngineDirectory, tmp_path: Path) -> None:
    shutil.copytree(packaged_repository(), tmp_path / "pipelines")
    (tmp_path / "pipelines/tensorrt_llm/config.pbtxt").unlink()
    with pytest.raises(FileNotFoundError):
        TritonExport(engine, tmp_path / "pipelines", tmp_path / "models").write()
    assert not (tmp_path / "models").exists()
