from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tritonclient.grpc.model_config_pb2 import ModelInstanceGroup

from llmserve.backends.tensorrtllm.parameters import ModelParameters
from llmserve.engine.settings import EngineSettings, GpuSettings
from llmserve.errors import ModelConfigError
from llmserve.scheduler.drafts.drafter import Speculation
from llmserve.scheduler.settings import Policy, SchedulerSettings
from tests.backends.tensorrtllm.models import read_config, with_parameters


def read(tmp_path: Path, **parameters: str) -> ModelParameters:
    config = with_parameters(read_config("tensorrt_llm"), gpt_model_path=str(tmp_path / "engine"), **parameters)
    return ModelParameters.read(config, tmp_path / "repository/tensorrt_llm")


def test_the_shipped_config_has_the_defaults(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parameters = read(tmp_path)
    assert parameters == ModelParameters(tmp_path / "engine", tmp_path / "engine", EngineSettings(), True)
    assert caplog.records == []


def test_parameters_become_settings(tmp_path: Path) -> None:
    parameters = read(
        tmp_path,
        batch_scheduler_policy="max_utilization",
        enable_kv_cache_reuse="False",
        max_queue_size="7",
        speculation="off",
        kv_cache_free_gpu_mem_fraction="0.5",
        max_tokens_in_paged_kv_cache="8000",
        num_threads="2",
        exclude_input_in_output="false",
        tokenizer_dir="/elsewhere",
    )
    scheduler = SchedulerSettings(
        Policy.MAX_UTILIZATION, enable_block_reuse=False, max_queue_size=7, speculation=Speculation.OFF
    )
    assert parameters.engine == EngineSettings(2, 0.5, 8000, scheduler)
    assert parameters.tokenizer_dir == Path("/elsewhere")
    assert not parameters.excludes_input


def test_speculation_is_on_unless_it_is_turned_off(tmp_path: Path) -> None:
    assert read(tmp_path).engine.scheduler.speculation is Speculation.ALL
    assert read(tmp_path, speculation="Grammar").engine.scheduler.speculation is Speculation.GRAMMAR
    both = Speculation.LOOKUP | Speculation.GRAMMAR
    assert read(tmp_path, speculation="grammar, lookup").engine.scheduler.speculation is both
    with pytest.raises(ModelConfigError, match=r"speculation is 'on': expected off, or names .*: lookup,grammar"):
        read(tmp_path, speculation="on")


def test_a_folder_for_the_kv_cache(tmp_path: Path) -> None:
    found = read(tmp_path, kv_cache_dir="/kv", kv_cache_disk_size="1000").engine.gpu
    assert (found.kv_cache_dir, found.kv_cache_disk_size) == ("/kv", 1000)
    assert read(tmp_path, draft_engine="/engines/small").engine.gpu.draft_engine == "/engines/small"
    with pytest.raises(ModelConfigError, match="kv_cache_disk_size has no effect without kv_cache_dir"):
        read(tmp_path, kv_cache_disk_size="1000")
    with pytest.raises(ModelConfigError, match="kv_cache_disk_size must be at least 1, got 0"):
        read(tmp_path, kv_cache_dir="/kv", kv_cache_disk_size="0")


def test_the_first_name_of_the_careful_policy(tmp_path: Path) -> None:
    policy = read(tmp_path, batch_scheduler_policy="guaranteed_completion").engine.scheduler.policy
    assert policy is Policy.GUARANTEED_NO_EVICT


def test_gpus_of_instance_groups_are_passed_on_to_the_engine(tmp_path: Path) -> None:
    config = with_parameters(read_config("tensorrt_llm"), gpt_model_path=str(tmp_path))
    del config.instance_group[:]
    config.instance_group.add(kind=ModelInstanceGroup.KIND_GPU, gpus=[2])
    config.instance_group.add(kind=ModelInstanceGroup.KIND_CPU)
    config.instance_group.add(kind=ModelInstanceGroup.KIND_GPU, gpus=[0, 1])
    assert ModelParameters.read(config, tmp_path).engine.gpu.instance_gpus == (2, 0, 1)
    config.instance_group.add(kind=ModelInstanceGroup.KIND_GPU, gpus=[1])
    with pytest.raises(ModelConfigError, match="gpus of instance_group must be distinct numbers, 0 or more, got 2,0,1"):
        ModelParameters.read(config, tmp_path)


def test_parameters_for_gpus_are_passed_on_to_the_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whether the engine honours them is its own to say: see tests/engine/tensorrt_llm."""
    parameters = read(
        tmp_path,
        max_beam_width="4",
        enable_chunked_context="false",
        max_attention_window_size="4096, 1024",
        sink_token_length="4",
        kv_cache_host_memory_bytes="1073741824",
        kv_cache_onboard_blocks="true",
        iter_stats_max_iterations="10",
        gpu_device_ids="0,1",
        executor_worker_path="/opt/worker",
        normalize_log_probs="false",
        multi_block_mode="true",
        enable_context_fmha_fp32_acc="true",
        cuda_graph_mode="true",
        cuda_graph_cache_size="8",
        gpu_weights_percent="0.5",
    )
    assert parameters.engine.gpu == GpuSettings(
        max_beam_width=4, enable_chunked_context=False, max_attention_window_size=(4096, 1024), sink_token_length=4,
        kv_cache_host_memory_bytes=1 << 30, kv_cache_onboard_blocks=True, iter_stats_max_iterations=10,
        gpu_device_ids=(0, 1), executor_worker_path="/opt/worker", normalize_log_probs=False, multi_block_mode=True,
        enable_context_fmha_fp32_acc=True, cuda_graph_mode=True, cuda_graph_cache_size=8, gpu_weights_percent=0.5,
    )  # fmt: skip
    assert caplog.records == []
    with pytest.raises(ModelConfigError, match="gpu_device_ids is 'all'"):
        read(tmp_path, gpu_device_ids="all")


def test_the_queue_policy_of_the_config_counts(tmp_path: Path) -> None:
    config = read_config("tensorrt_llm")
    config.dynamic_batching.default_queue_policy.max_queue_size = 3
    assert ModelParameters.read(config, tmp_path / "r/m").engine.scheduler.max_queue_size == 3


def test_the_engine_path_is_relative_to_the_repositorys_parent(tmp_path: Path) -> None:
    (tmp_path / "engines/default").mkdir(parents=True)
    parameters = ModelParameters.read(read_config("tensorrt_llm"), tmp_path / "repository/tensorrt_llm")
    assert parameters.engine_dir == tmp_path / "engines/default"


def test_what_has_no_effect_is_reported_and_what_is_so_anyway_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read(
        tmp_path,
        gpt_model_type="inflight_fused_batching",
        max_beam_width="1",
        cuda_graph_mode="true",
        unheard_of="1",
        sink_token_length="",
        lora_prefetch_dir="${lora_prefetch_dir}",
        decoding_mode="${decoding_mode}",
    )
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    assert [record.getMessage() for record in caplog.records] == [
        "model 'tensorrt_llm': parameter unheard_of = 1 has no effect on this engine",
        "model 'tensorrt_llm': unfilled placeholders, ignored: decoding_mode, lora_prefetch_dir",
    ]


def test_all_unusable_values_are_listed(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError) as caught:
        read(
            tmp_path,
            batch_scheduler_policy="fastest",
            enable_kv_cache_reuse="maybe",
            max_queue_size="many",
            kv_cache_free_gpu_mem_fraction="1.5",
        )
    for words in ("guaranteed_no_evict or max_utilization", "true or false", "max_queue_size", "(0, 1], got 1.5"):
        assert words in str(caught.value)


def test_an_engine_path_is_required(tmp_path: Path) -> None:
    config = with_parameters(read_config("tensorrt_llm"), gpt_model_path="${engine_dir}")
    with pytest.raises(ModelConfigError, match="gpt_model_path is not set"):
        ModelParameters.read(config, tmp_path / "r/m")


def test_what_is_no_number_is_said_to_people_all_at_once(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError) as raised:
        read(tmp_path, num_threads="two", kv_cache_free_gpu_mem_fraction="half", max_attention_window_size="1;2")
    message = str(raised.value)
    assert "num_threads is 'two': expected an integer" in message
    assert "kv_cache_free_gpu_mem_fraction is 'half': expected a number" in message
    assert "max_attention_window_size is '1;2': expected whole numbers separated by commas" in message


def test_a_version_may_be_an_engine_directory_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = read_config("tensorrt_llm")
    del config.parameters["gpt_model_path"]
    version_dir = tmp_path / "repository/tensorrt_llm/2"
    version_dir.mkdir(parents=True)
    with pytest.raises(ModelConfigError, match="gpt_model_path is not set"):
        ModelParameters.read(config, version_dir.parent, version_dir)
    (version_dir / "manifest.json").write_text("{}")
    parameters = ModelParameters.read(config, version_dir.parent, version_dir)
    assert (parameters.engine_dir, parameters.tokenizer_dir) == (version_dir, version_dir)
    named = with_parameters(config, gpt_model_path="/named", rollout='{"shadow": "5%"}')
    assert ModelParameters.read(named, version_dir.parent, version_dir).engine_dir == Path("/named")
    assert caplog.records == []
