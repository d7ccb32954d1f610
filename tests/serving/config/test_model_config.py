"""Defaults, validation, versions and overrides of a model's config."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from llmserve.serving.config.features import has_gpu, ignored_features
from llmserve.serving.config.model_config import (
    apply_overrides,
    config_problems,
    drop_repeated_outputs,
    fill_defaults,
    instance_names,
    served_versions,
)
from tests.serving.models import identity_config, serving, write_model


def completed(text: str) -> ModelConfig:
    config: ModelConfig = text_format.Parse('name: "m"\n' + text, ModelConfig())
    fill_defaults(config)
    return config


def test_defaults_are_those_that_triton_reports() -> None:
    config = completed(identity_config())
    assert config.version_policy.latest.num_versions == 1
    assert [(group.name, group.count, group.kind) for group in config.instance_group] == [
        ("m", 1, ModelInstanceGroup.KIND_CPU)
    ]
    assert config.optimization.input_pinned_memory.enable
    assert instance_names(config) == ["m_0"]


def test_instance_names_over_groups() -> None:
    config = completed(identity_config('instance_group [ { count: 2 }, { name: "big" } ]'))
    assert instance_names(config) == ["m_0_0", "m_0_1", "big_0"]


def test_ensembles_have_no_instances() -> None:
    config = completed(identity_config("ensemble_scheduling { }"))
    assert config.platform == "ensemble"
    assert not config.instance_group


def test_an_output_that_is_declared_again_in_the_same_words_is_dropped() -> None:
    config: ModelConfig = text_format.Parse(identity_config("max_batch_size: 4"), ModelConfig())
    names = [output.name for output in config.output]
    config.output.append(config.output[0])
    assert drop_repeated_outputs(config) == [f"output '{names[0]}' is declared more than once, always the same"]
    assert [output.name for output in config.output] == names
    assert drop_repeated_outputs(config) == []
    config.output.append(config.output[0])
    config.output[-1].dims.append(7)
    assert drop_repeated_outputs(config) == []
    assert "is declared 2 times" in str(config_problems(config))


def test_good_config_has_no_problems() -> None:
    assert config_problems(completed(identity_config("max_batch_size: 4 dynamic_batching { }"))) == []
    timeless = "dynamic_batching { preserve_ordering: true default_queue_policy { timeout_action: DELAY } }"
    assert config_problems(completed(identity_config(f"max_batch_size: 4 {timeless}"))) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("max_batch_size: -1", "max_batch_size must not be negative, got -1"),
        ("input { name: 'X' data_type: TYPE_FP32 dims: [ 1 ] }", "input 'X' is declared 2 times"),
        ("input { name: 'Z' dims: [ 1 ] }", "input 'Z' has no data_type"),
        ("input { name: 'Z' data_type: TYPE_FP32 }", "input 'Z' has no dims"),
        ("output { name: 'Z' data_type: TYPE_FP32 dims: [ 0, -2 ] }", "output 'Z': dims must be positive or -1"),
        (
            "input { name: 'Z' data_type: TYPE_FP32 dims: [ 4, -1 ] reshape { shape: [ 3, -1 ] } }",
            "input 'Z': reshape [3, -1] has not the same number of elements as dims [4, -1]",
        ),
        ("instance_group { count: -1 }", "count must be at least 1, got -1"),
        ("instance_group { name: 'a' } instance_group { name: 'a' }", "instance_group 'a' is declared 2 times"),
        ("dynamic_batching { }", "dynamic_batching needs max_batch_size of at least 1"),
        (
            "max_batch_size: 4 "
            "dynamic_batching { preserve_ordering: true priority_levels: 2 default_priority_level: 1 }",
            "preserve_ordering takes one priority level only",
        ),
        (
            "max_batch_size: 4 dynamic_batching { preserve_ordering: true default_queue_policy { timeout_action: DELAY "
            "default_timeout_microseconds: 9 } }",
            "DELAY contradicts preserve_ordering",
        ),
        ("max_batch_size: 4 dynamic_batching { preferred_batch_size: 8 }", "preferred_batch_size 8 is not in 1 .."),
        (
            "max_batch_size: 4 dynamic_batching { priority_levels: 2 }",
            "default_priority_level must be in 1 .. 2, got 0",
        ),
        ("version_policy { specific { } }", "version_policy specific lists no versions"),
        ("model_repository_agents { agents { name: 'checksum' } }", "model_repository_agents is not supported"),
    ],
)
def test_problem_is_reported(text: str, problem: str) -> None:
    assert [found for found in config_problems(completed(identity_config(text))) if problem in found]


def test_all_problems_at_once() -> None:
    problems = config_problems(completed("max_batch_size: -1 model_repository_agents { agents { name: 'checksum' } }"))
    assert len(problems) == 3  # refused feature, batch size, no output


@pytest.mark.parametrize(
    ("text", "feature"),
    [
        ("optimization { cuda { graphs: true } }", "optimization"),
        ("instance_group { kind: KIND_GPU }", "instance_group.kind"),
        ("metric_tags { key: 'cost-center' value: '7' }", "metric_tags"),
        ("metric_tags { key: '_x' value: 'y' }", "metric_tags"),
        ("metric_tags { value: 'y' }", "metric_tags"),
    ],
)
def test_setting_without_effect_is_named(text: str, feature: str) -> None:
    (warning,) = ignored_features(completed(identity_config(text)))
    assert warning.startswith(f"{feature} has no effect: ")


@pytest.mark.parametrize("backend", ["identity", "python", "onnxruntime", "pytorch", "tensorrtllm"])
@pytest.mark.parametrize("gpus", ["", "gpus: [ 0 ]"])
def test_a_gpu_that_is_not_there_is_refused_by_every_backend(
    backend: str, gpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = completed(identity_config(f"instance_group {{ kind: KIND_GPU {gpus} }}").replace("identity", backend))
    monkeypatch.setenv("PATH", str(tmp_path))
    if not has_gpu():  # on a machine with a driver there is always one
        (problem,) = config_problems(config)
        assert problem.startswith("instance group m_0 of model m has kind KIND_GPU but no GPUs are available")
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    assert config_problems(config) == []


def test_plain_config_ignores_nothing() -> None:
    assert ignored_features(completed(identity_config("max_batch_size: 2 dynamic_batching { }"))) == []
    assert ignored_features(completed(identity_config("metric_tags { key: 'Cost_center7' value: '7' }"))) == []


async def test_setting_without_effect_is_logged_at_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path, "m", identity_config("cc_model_filenames { key: 'a' value: 'b' }"))
    with caplog.at_level(logging.WARNING):
        async with serving(tmp_path) as core:
            assert core.ready()
    assert [line for line in caplog.messages if line.startswith("model 'm': cc_model_filenames has no effect")]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("", [7]),
        ("version_policy { latest { num_versions: 2 } }", [3, 7]),
        ("version_policy { latest { } }", [7]),
        ("version_policy { all { } }", [1, 3, 7]),
        ("version_policy { specific { versions: [ 1, 9 ] } }", [1]),
    ],
)
def test_version_policy(policy: str, expected: list[int]) -> None:
    assert served_versions(completed(policy), [3, 1, 7]) == expected


def test_overrides_replace_and_add() -> None:
    config = completed('parameters { key: "a" value { string_value: "1" } }')
    apply_overrides(config, {"a": "2", "b": "3"})
    assert {key: value.string_value for key, value in config.parameters.items()} == {"a": "2", "b": "3"}
