from dataclasses import asdict, dataclass

DTYPES = ("auto", "float16", "float32", "bfloat16", "int32", None)


@dataclass
class PluginConfig:
    """Defaults of release 1.2. Unknown names are refused, as pydantic's extra="forbid" does."""

    dtype: str = "float16"
    bert_attention_plugin: str | None = "auto"
    gpt_attention_plugin: str | None = "auto"
    gemm_plugin: str | None = None
    moe_plugin: str | None = "auto"
    nccl_plugin: str | None = "auto"
    mamba_conv1d_plugin: str | None = "auto"
    gemm_swiglu_plugin: str | None = None
    fp8_rowwise_gemm_plugin: str | None = None
    qserve_gemm_plugin: str | None = None
    lora_plugin: str | None = None
    dora_plugin: bool = False
    weight_only_groupwise_quant_matmul_plugin: str | None = None
    weight_only_quant_matmul_plugin: str | None = None
    smooth_quant_plugins: bool = True
    low_latency_gemm_plugin: str | None = None
    low_latency_gemm_swiglu_plugin: str | None = None
    gemm_allreduce_plugin: str | None = None
    context_fmha: bool = True
    bert_context_fmha_fp32_acc: bool = False
    paged_kv_cache: bool | None = None
    remove_input_padding: bool = True
    norm_quant_fusion: bool = False
    reduce_fusion: bool = False
    user_buffer: bool = False
    tokens_per_block: int = 32
    use_paged_context_fmha: bool = True
    use_fp8_context_fmha: bool = True
    fuse_fp4_quant: bool = False
    multiple_profiles: bool = False
    paged_state: bool = True
    streamingllm: bool = False
    manage_weights: bool = False
    use_fused_mlp: bool = True
    pp_reduce_scatter: bool = False

    def __post_init__(self) -> None:
        for name in ("gpt_attention_plugin", "gemm_plugin", "weight_only_quant_matmul_plugin"):
            assert getattr(self, name) in DTYPES, f"{name} has unexpected value: {getattr(self, name)}"
        for name in ("context_fmha", "remove_input_padding", "reduce_fusion", "multiple_profiles", "use_fused_mlp"):
            assert isinstance(getattr(self, name), bool), f"{name} must be a bool"

    def to_dict(self) -> dict[str, object]:
        return asdict(self)
