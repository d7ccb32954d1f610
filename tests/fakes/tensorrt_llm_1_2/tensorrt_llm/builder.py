import copy
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from tensorrt_llm.models.modeling_utils import PretrainedModel
from tensorrt_llm.plugin import PluginConfig
from tensorrt_llm.version import __version__


@dataclass
class BuildConfig:
    max_input_len: int = 1024
    max_seq_len: int | None = None
    opt_batch_size: int = 8
    max_batch_size: int = 2048
    max_beam_width: int = 1
    max_num_tokens: int = 8192
    opt_num_tokens: int | None = None
    max_prompt_embedding_table_size: int = 0
    kv_cache_type: Any = None
    gather_context_logits: bool = False
    gather_generation_logits: bool = False
    strongly_typed: bool = True
    force_num_profiles: int | None = None
    profiling_verbosity: str = "layer_names_only"
    enable_debug_output: bool = False
    max_draft_len: int = 0
    use_refit: bool = False
    input_timing_cache: str | None = None
    output_timing_cache: str | None = "model.cache"
    weight_sparsity: bool = False
    weight_streaming: bool = False
    plugin_config: PluginConfig = field(default_factory=PluginConfig)
    use_strip_plan: bool = False
    max_encoder_input_len: int = 1024
    dry_run: bool = False
    visualize_network: str | None = None
    monitor_memory: bool = False
    use_mrope: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "plugin_config": self.plugin_config.to_dict()}


class Engine:
    def __init__(self, config: dict[str, Any], rank: int, weights: dict[str, Any]) -> None:
        self.config = config
        self._rank = rank
        self._weights = weights

    def save(self, engine_dir: str) -> None:
        os.makedirs(engine_dir, exist_ok=True)
        if self._rank == 0:
            (Path(engine_dir) / "config.json").write_text(json.dumps(self.config, indent=4))
        save_file(self._weights, Path(engine_dir) / f"rank{self._rank}.engine")


def get_sm_version() -> int:
    return int(os.environ.get("FAKE_GPU_CAPABILITY", "9.0").replace(".", ""))


def build(model: PretrainedModel, build_config: BuildConfig) -> Engine:
    """`FAKE_TRTLLM_BUILD`: "fail" makes rank 1 raise, "die" makes its process end as the kernel's killer ends it."""
    rank = model.config.mapping.rank
    if rank == 1 and (how := os.environ.get("FAKE_TRTLLM_BUILD")):
        if how == "die":
            os._exit(137)
        raise RuntimeError("Engine building failed, please check the error log.")
    assert "," not in os.environ["CUDA_VISIBLE_DEVICES"], "the test's rule: a rank sees one GPU"
    assert build_config.opt_batch_size <= build_config.max_batch_size
    config = copy.deepcopy(build_config)
    plugins = config.plugin_config
    plugins.dtype = model.config.dtype
    plugins.paged_kv_cache = True
    if model.config.mapping.tp_size == 1 or model.config.architecture != "LlamaForCausalLM":
        plugins.reduce_fusion = False
    if not plugins.context_fmha:
        plugins.use_paged_context_fmha = False
    if model.config.quant_algo is not None:
        if 100 <= get_sm_version() < 120:
            raise RuntimeError("INT8/INT4 quantization is not supported on SM>=100.")
        assert model.config.dtype != "float32", "the plugin's kernels are for float16 and bfloat16"
    if config.input_timing_cache is not None:
        assert Path(config.input_timing_cache).read_text() == "timings"
    if config.output_timing_cache is not None:
        Path(config.output_timing_cache).write_text("timings")
    content = {"version": __version__, "pretrained_config": model.config.to_dict(), "build_config": config.to_dict()}
    return Engine(content, rank, model.weights)
