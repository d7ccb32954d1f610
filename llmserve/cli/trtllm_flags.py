"""Translations of flags of TensorRT-LLM's programs that llmserve's commands do not have under the same name.

`BUILD`: examples/baichuan/build.py of 0.5 to 0.8, convert_checkpoint.py, quantize.py and trtllm-build. `RUN`: run.py.
`SUMMARIZE`: summarize.py. old_flags.py describes the tables.
"""

from __future__ import annotations

from llmserve.cli.old_flags import OldFlags

CONFIG = "config.json of the checkpoint says it"
GPU_KERNELS = "TensorRT's kernels"
LOGS = "logs of TensorRT-LLM's own"
LORA = "merge the adapter into the engine: llmserve build --lora DIR"

BUILD = OldFlags.of(
    becomes={
        "use-gemm-plugin?": "--gemm-plugin {}",
        "use-gemm-plugin=": "--gemm-plugin auto",
        "gemm-plugin?": "--gemm-plugin {}",
        "gemm-plugin=": "--gemm-plugin auto",
        "use-gpt-attention-plugin?": "--gpt-attention-plugin {}",
        "use-gpt-attention-plugin=": "--gpt-attention-plugin auto",
        "gpt-attention-plugin?": "--gpt-attention-plugin {}",
        "gpt-attention-plugin=": "--gpt-attention-plugin auto",
        "enable-context-fmha": "--context-fmha enable",
        "context-fmha?": "--context-fmha {}",
        "context-fmha=": "--context-fmha enable",
        "remove-input-padding?": "--remove-input-padding {}",
        "remove-input-padding=": "--remove-input-padding enable",
        "paged-kv-cache?": "--kv-cache-type paged",
        "paged-kv-cache=disable": "--kv-cache-type continuous",
        "weight-only-precision?": "--weight-only-precision {}",
        "weight-only-precision=": "--weight-only-precision int8",
        "use-smooth-quant": "--quantization int8",
        "smoothquant:": "--quantization int8",
        "sq:": "--quantization int8",
        "int8-kv-cache": "--kv-cache-dtype int8",
        "world-size:": "--tp-size {}",
        "n-gpus:": "--tp-size {}",
        "auto-parallel:": "--tp-size {}",
        "max-decoder-seq-len:": "--max-seq-len {}",
        "qformat=int8_sq": "--quantization int8",
        "qformat=int8_wo": "--quantization int8",
        "qformat=int4_wo": "--quantization int4",
        "qformat=int4_awq": "--quantization int4",
        "qformat=full_prec": "",
    },
    no_effect={
        CONFIG: "model-version: vocab-size: n-layer: n-positions: n-embd: n-head: n-kv-head: inter-size: hidden-act: "
        "rms-norm-eps: rotary-base: rotary-pct: max-encoder-input-len: trust-remote-code",
        "always so": "use-inflight-batching enable-context-fmha-fp32-acc? context-fmha-fp32-acc? strongly-typed "
        "logits-dtype: per-channel per-token per-group calibrate-kv-cache kv gather-context-logits "
        "gather-generation-logits gather-all-token-logits",
        GPU_KERNELS: "use-rmsnorm-plugin? use-layernorm-plugin? use-lookup-plugin? lookup-plugin? rmsnorm-plugin? "
        "layernorm-plugin? bert-attention-plugin? identity-plugin? nccl-plugin? moe-plugin? "
        "smooth-quant-gemm-plugin? smooth-quant-plugins? weight-only-quant-matmul-plugin? "
        "weight-only-groupwise-quant-matmul-plugin? rmsnorm-quantization-plugin? "
        "layernorm-quantization-plugin? quantize-per-token-plugin? quantize-tensor-plugin? "
        "attention-qk-half-accumulation? use-custom-all-reduce? use-paged-context-fmha? "
        "use-fp8-context-fmha? use-context-fmha-for-generation? multi-block-mode? enable-xqa? "
        "paged-state? use-fused-mlp? use-parallel-embedding embedding-sharding-dim: "
        "use-embedding-sharing opt-num-tokens: opt-batch-size: gpus-per-node: cluster-key: weight-sparsity "
        "weight-streaming strip-plan fast-build enable-fp8-context-fmha",
        "tactics are timed by llmserve tune": "timing-cache: input-timing-cache: output-timing-cache:",
        LOGS: "log-level: profiling-verbosity: visualize visualize-network: enable-debug-output monitor-memory",
        "a build reads one tensor at a time": "load-by-shard load-model-on-cpu",
        "the data is named with --calibration-data FILE": "calib-dataset: calib-size: calib-tp-size: calib-pp-size: "
        "dataset-cache-dir: batch-size:",
        "group sizes are fixed": "group-size: awq-block-size:",
        "off in either program": "max-prompt-embedding-table-size=0 max-multimodal-len=0 max-draft-len=0 lora-plugin= "
        "lora-plugin=disable streamingllm=disable",
    },
    refused={
        "write --quantization int8 instead": "enable-fp8 use-fp8 quantized-fp8-model-path:",
        "write --kv-cache-dtype int8 instead": "fp8-kv-cache",
        "give the GPTQ or AWQ folder itself as --model_dir, it is recognized": "quant-ckpt-path: "
        "weight-only-precision=int4_gptq weight-only-precision=int4_awq",
        "write --quantization int8 or int4": "qformat:",
        "give the Hugging Face folder as --model_dir": "bin-model-dir: ft-model-dir: meta-ckpt-dir: model-config:",
        "write what is in it as flags, or as a --recipe": "build-config:",
        "a checkpoint's code is never run; docs/models.md lists the architectures": "model-cls-file: model-cls-name:",
        LORA: "lora-plugin? lora-dir* hf-lora-dir: lora-ckpt-source: lora-target-modules* max-lora-rank: "
        "use-lora-plugin?",
        "llmserve serve drafts by itself; leave it out": "speculative-decoding-mode: max-draft-len:",
        "prompt embeddings are not supported; leave it out": "max-prompt-embedding-table-size: max-multimodal-len: "
        "use-prompt-tuning",
        "it would change answers; leave it out": "streamingllm?",
    },
)

RUN = OldFlags.of(
    becomes={},
    no_effect={
        CONFIG: "model-version: tokenizer-type: vocab-file: trust-remote-code",
        LOGS: "log-level: debug-mode run-profiling",
        "one way to run an engine": "use-py-session",
        "a prompt may be as long as the engine's max_seq_len": "max-input-length:",
        "each piece is printed as it comes": "streaming-interval:",
        "the tokenizer's own rule": "no-add-special-tokens no-prompt-template",
        "blocks are allocated as needed": "max-kv-cache-length: max-attention-window-size* sink-token-length: "
        "max-tokens-in-paged-kv-cache: kv-cache-enable-block-reuse kv-cache-free-gpu-memory-fraction: "
        "enable-chunked-context multi-block-mode? enable-context-fmha-fp32-acc",
        "for beams only": "length-penalty: early-stopping: beam-search-diversity-rate:",
        "GPUs only": "gpu-weights-percent: cuda-graph-mode",
    },
    refused={
        LORA: "lora-dir* lora-task-uids* lora-ckpt-source:",
        "prompt embeddings are not supported; leave it out": "prompt-table-path: prompt-tasks: num-prepend-vtokens*",
        "llmserve serve has return_context_logits and return_generation_logits": "output-logits-npy:",
        "llmserve serve has return_log_probs": "output-log-probs-npy: output-cum-log-probs-npy:",
    },
)

SUMMARIZE = OldFlags.of(
    becomes={
        "engine-dir:": "{}",
        "hf-model-location:": "--hf-model-dir {}",
        "data-type:": "--dtype {}",
        "data-type=fp16": "--dtype float16",
        "data-type=bf16": "--dtype bfloat16",
        "data-type=fp32": "--dtype float32",
        "hf-data-type:": "--dtype {}",
        "hf-data-type=fp16": "--dtype float16",
        "hf-data-type=bf16": "--dtype bfloat16",
        "hf-data-type=fp32": "--dtype float32",
        "output-dir:": "--output {}/report.json",
    },
    no_effect={
        "the suite says it": "output-len: max-input-length: min-input-length: eval-task: dataset-path: dataset-dir: "
        "dataset-cache-dir: random-seed:",
        "the engine directory has the tokenizer": "tokenizer-dir: vocab-file: tokenizer-type: model-version: "
        "no-add-special-tokens trust-remote-code",
        "always measured": "eval-ppl eval-context-ppl tensorrt-llm-ppl-threshold: estimate-accuracy-std-dev",
        "ROUGE is computed without files": "rouge-dir:",
        LOGS: "log-level: debug-mode",
        "one way to run an engine": "use-py-session hf-device-map-auto",
        "blocks are allocated as needed": "max-kv-cache-length: max-attention-window-size* sink-token-length: "
        "kv-cache-free-gpu-memory-fraction: kv-cache-enable-block-reuse enable-chunked-context multi-block-mode?",
        "answers are greedy": "num-beams=1 top-k=1 top-p=0 top-p=0.0 top-p=1 top-p=1.0 length-penalty: temperature=1 "
        "temperature=1.0 repetition-penalty=1 repetition-penalty=1.0 early-stopping: presence-penalty=0 "
        "presence-penalty=0.0 frequency-penalty=0 frequency-penalty=0.0",
    },
    refused={
        "both sides decode greedily; leave it out": "num-beams: top-k: top-p: temperature: "
        "repetition-penalty: presence-penalty: frequency-penalty:",
        LORA: "lora-dir* lora-task-uids*",
        "prompt embeddings are not supported; leave it out": "num-prepend-vtokens*",
    },
)
