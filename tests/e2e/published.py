"""Model repositories as releases of tensorrtllm_backend publish them, and how their users set them up.

`TENSORS` has the tensors of each release's configs, and which of them its ensemble joins; the Python models in
`repository/` make the same calls of transformers as the published ones, and read each required input without asking
whether it is there. No published file is copied.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template

PYTHON_MODELS = Path(__file__).with_name("repository")
RELEASES = ("0.5", "0.6.1", "0.7.1", "0.8", "0.10", "0.13", "0.17")
LATER = "0.10"  # the release that stands for those in between
# What its README fills in with fill_template.py; the other placeholders stay as they are.
FILLED = {
    "triton_max_batch_size": "64",
    "decoupled_mode": "True",
    "max_queue_delay_microseconds": "0",
    "max_queue_size": "0",
    "logits_datatype": "TYPE_FP32",
    "preprocessing_instance_count": "1",
    "postprocessing_instance_count": "1",
    "batching_strategy": "inflight_fused_batching",
    "exclude_input_in_output": "True",
    "engine_dir": "/engines/of/another/machine",
    "tokenizer_dir": "/tokenizers/of/another/machine",
    "tokenizer_type": "auto",
}

# Direction, tensor of the model, tensor of the ensemble ("-": not joined), datatype, dims, then any of: opt, ragged,
# scalar (reshaped to no dimension), and the releases that have it. COUNT is the datatype of counts and ids.
TENSORS = {
    "preprocessing": """
    in  QUERY                    text_input                  STRING -1     0.5..0.8
    in  QUERY                    text_input                  STRING 1      0.10..
    in  DECODER_QUERY            decoder_text_input          STRING 1      opt 0.10..
    in  REQUEST_OUTPUT_LEN       max_tokens                  COUNT  -1     0.5..0.8
    in  REQUEST_OUTPUT_LEN       max_tokens                  COUNT  1      0.10..
    in  BAD_WORDS_DICT           bad_words                   STRING -1     0.5..0.5
    in  STOP_WORDS_DICT          stop_words                  STRING -1     0.5..0.5
    in  BAD_WORDS_DICT           bad_words                   STRING -1     opt 0.6.1..
    in  STOP_WORDS_DICT          stop_words                  STRING -1     opt 0.6.1..
    in  EMBEDDING_BIAS_WORDS     embedding_bias_words        STRING -1     opt 0.6.1..
    in  EMBEDDING_BIAS_WEIGHTS   embedding_bias_weights      FP32   -1     opt 0.6.1..
    in  END_ID                   end_id                      INT32  1      opt 0.10..
    in  PAD_ID                   pad_id                      INT32  1      opt 0.10..
    in  PROMPT_TABLE_EXTRA_ID    prompt_table_extra_id       UINT64 1      opt 0.17..
    out INPUT_ID                 _INPUT_ID                   INT32  -1
    out REQUEST_INPUT_LEN        _REQUEST_INPUT_LEN          INT32  1
    out DECODER_INPUT_ID         _DECODER_INPUT_ID           INT32  -1     0.10..
    out REQUEST_DECODER_INPUT_LEN _REQUEST_DECODER_INPUT_LEN INT32  1      0.10..
    out BAD_WORDS_IDS            -                           INT32  2,-1   0.5..0.5
    out STOP_WORDS_IDS           -                           INT32  2,-1   0.5..0.5
    out BAD_WORDS_IDS            _BAD_WORDS_IDS              INT32  2,-1   0.6.1..
    out STOP_WORDS_IDS           _STOP_WORDS_IDS             INT32  2,-1   0.6.1..
    out EMBEDDING_BIAS           _EMBEDDING_BIAS             FP32   -1     0.6.1..
    out REQUEST_OUTPUT_LEN       _REQUEST_OUTPUT_LEN         COUNT  -1
    out OUT_END_ID               _PREPROCESSOR_END_ID        INT32  1      0.10..
    out OUT_PAD_ID               _PREPROCESSOR_PAD_ID        INT32  1      0.10..
    out OUT_PROMPT_TABLE_EXTRA_IDS _OUT_PROMPT_TABLE_EXTRA_IDS UINT64 -1   0.17..
    """,
    "tensorrt_llm": """
    in  input_ids                _INPUT_ID                   INT32  -1     0.5..0.5
    in  input_ids                _INPUT_ID                   INT32  -1     ragged 0.6.1..
    in  input_lengths            _REQUEST_INPUT_LEN          INT32  1      scalar
    in  request_output_len       _REQUEST_OUTPUT_LEN         COUNT  1      0.5..0.13
    in  request_output_len       _REQUEST_OUTPUT_LEN         INT32  1      scalar 0.17..
    in  decoder_input_ids        _DECODER_INPUT_ID           INT32  -1     opt ragged 0.10..
    in  decoder_input_lengths    _REQUEST_DECODER_INPUT_LEN  INT32  1      opt scalar 0.10..
    in  draft_input_ids          -                           INT32  -1     opt ragged 0.7.1..
    in  end_id                   end_id                      COUNT  1      opt scalar 0.5..0.8
    in  pad_id                   pad_id                      COUNT  1      opt scalar 0.5..0.8
    in  end_id                   _PREPROCESSOR_END_ID        INT32  1      opt scalar 0.10..
    in  pad_id                   _PREPROCESSOR_PAD_ID        INT32  1      opt scalar 0.10..
    in  stop_words_list          -                           INT32  2,-1   opt 0.5..0.5
    in  bad_words_list           -                           INT32  2,-1   opt 0.5..0.5
    in  stop_words_list          _STOP_WORDS_IDS             INT32  2,-1   opt ragged 0.6.1..
    in  bad_words_list           _BAD_WORDS_IDS              INT32  2,-1   opt ragged 0.6.1..
    in  embedding_bias           _EMBEDDING_BIAS             FP32   -1     opt ragged 0.6.1..
    in  beam_width               beam_width                  COUNT  1      opt scalar
    in  temperature              temperature                 FP32   1      opt scalar
    in  runtime_top_k            top_k                       COUNT  1      opt scalar
    in  runtime_top_p            top_p                       FP32   1      opt scalar
    in  len_penalty              length_penalty              FP32   1      opt scalar
    in  repetition_penalty       repetition_penalty          FP32   1      opt scalar
    in  min_length               min_length                  COUNT  1      opt scalar 0.5..0.13
    in  min_tokens               min_tokens                  INT32  1      opt scalar 0.17..
    in  presence_penalty         presence_penalty            FP32   1      opt scalar
    in  frequency_penalty        frequency_penalty           FP32   1      opt scalar 0.10..
    in  random_seed              random_seed                 UINT64 1      opt scalar 0.5..0.13
    in  seed                     seed                        UINT64 1      opt scalar 0.17..
    in  return_log_probs         return_log_probs            BOOL   1      opt scalar 0.6.1..
    in  return_context_logits    return_context_logits       BOOL   1      opt scalar 0.13..
    in  return_generation_logits return_generation_logits    BOOL   1      opt scalar 0.13..
    in  return_perf_metrics      return_perf_metrics         BOOL   1      opt scalar 0.17..
    in  num_return_sequences     num_return_sequences        INT32  1      opt scalar 0.17..
    in  exclude_input_in_output  exclude_input_in_output     BOOL   1      opt scalar 0.17..
    in  stop                     -                           BOOL   1      opt
    in  streaming                stream                      BOOL   1      opt
    in  prompt_embedding_table   prompt_embedding_table      FP16   -1,-1  opt ragged 0.6.1..
    in  prompt_table_extra_ids   _OUT_PROMPT_TABLE_EXTRA_IDS UINT64 -1     opt ragged 0.17..
    in  prompt_vocab_size        prompt_vocab_size           COUNT  1      opt scalar 0.6.1..
    in  lora_task_id             lora_task_id                UINT64 1      opt scalar 0.17..
    in  lora_weights             lora_weights                FP16   -1,-1  opt ragged 0.17..
    in  lora_config              lora_config                 INT32  -1,3   opt ragged 0.17..
    out output_ids               _TOKENS_BATCH               INT32  -1,-1
    out sequence_length          -                           INT32  -1     0.5..0.5
    out sequence_length          _SEQUENCE_LENGTH            INT32  -1     0.6.1..
    out cum_log_probs            _CUM_LOG_PROBS              FP32   -1     0.6.1..0.13
    out output_log_probs         _OUTPUT_LOG_PROBS           FP32   -1,-1  0.6.1..0.13
    out context_logits           _CONTEXT_LOGITS             FP32   -1,-1  0.8..0.13
    out generation_logits        _GENERATION_LOGITS          FP32   -1,-1,-1 0.8..0.13
    out batch_index              _BATCH_INDEX                INT32  1      0.13..0.13
    out cum_log_probs            cum_log_probs               FP32   -1     0.17..
    out output_log_probs         output_log_probs            FP32   -1,-1  0.17..
    out context_logits           context_logits              LOGITS -1,-1  0.17..
    out generation_logits        generation_logits           LOGITS -1,-1,-1 0.17..
    out batch_index              batch_index                 INT32  1      0.17..
    out sequence_index           sequence_index              INT32  1      0.17..
    out context_phase_params     -                           UINT8  -1     0.17..
    out kv_cache_alloc_new_blocks kv_cache_alloc_new_blocks  INT32  1      0.17..
    out kv_cache_reused_blocks   kv_cache_reused_blocks      INT32  1      0.17..
    out kv_cache_alloc_total_blocks kv_cache_alloc_total_blocks INT32 1    0.17..
    """,
    "postprocessing": """
    in  TOKENS_BATCH             _TOKENS_BATCH               INT32  -1,-1
    in  SEQUENCE_LENGTH          _SEQUENCE_LENGTH            INT32  -1     0.6.1..
    in  CUM_LOG_PROBS            _CUM_LOG_PROBS              FP32   -1     0.6.1..0.8
    in  OUTPUT_LOG_PROBS         _OUTPUT_LOG_PROBS           FP32   -1,-1  0.6.1..0.8
    in  CUM_LOG_PROBS            _CUM_LOG_PROBS              FP32   -1     opt 0.10..0.13
    in  OUTPUT_LOG_PROBS         _OUTPUT_LOG_PROBS           FP32   -1,-1  opt 0.10..0.13
    in  CONTEXT_LOGITS           _CONTEXT_LOGITS             FP32   -1,-1  opt 0.8..0.13
    in  GENERATION_LOGITS        _GENERATION_LOGITS          FP32   -1,-1,-1 opt 0.8..0.13
    in  BATCH_INDEX              _BATCH_INDEX                INT32  1      opt 0.13..0.13
    out OUTPUT                   text_output                 STRING -1,-1  0.5..0.5
    out OUTPUT                   text_output                 STRING -1     0.6.1..
    out OUT_CUM_LOG_PROBS        cum_log_probs               FP32   -1     0.6.1..0.13
    out OUT_OUTPUT_LOG_PROBS     output_log_probs            FP32   -1,-1  0.6.1..0.13
    out OUT_CONTEXT_LOGITS       context_logits              FP32   -1,-1  0.8..0.13
    out OUT_GENERATION_LOGITS    generation_logits           FP32   -1,-1,-1 0.8..0.13
    out OUT_BATCH_INDEX          batch_index                 INT32  1      0.13..0.13
    """,
}
PARAMETERS = {
    "preprocessing": "tokenizer_dir tokenizer_type add_special_tokens",
    "tensorrt_llm": "max_beam_width FORCE_CPU_ONLY_INPUT_TENSORS=no gpt_model_type=${batching_strategy} "
    "gpt_model_path=${engine_dir} max_tokens_in_paged_kv_cache batch_scheduler_policy kv_cache_free_gpu_mem_fraction "
    "exclude_input_in_output cancellation_check_period_ms enable_kv_cache_reuse gpu_device_ids decoding_mode "
    "executor_worker_path=/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",
    "postprocessing": "tokenizer_dir tokenizer_type skip_special_tokens",
}
MODEL = """name: "$name"
backend: "$backend"
max_batch_size: $${triton_max_batch_size}
$policy
input [ $inputs ]
output [ $outputs ]
$parameters
instance_group [ { count: $count kind: KIND_CPU } ]
"""
ENGINE_POLICY = """model_transaction_policy { decoupled: ${decoupled_mode} }
dynamic_batching {
  preferred_batch_size: [ ${triton_max_batch_size} ]
  max_queue_delay_microseconds: ${max_queue_delay_microseconds}
}"""


@dataclass(frozen=True)
class PublishedTensor:
    direction: str  # "in" or "out"
    name: str
    joined: str  # the ensemble's name of it; "-": none
    datatype: str
    dims: str
    flags: frozenset[str] = frozenset()

    def declared(self, name: str) -> str:
        text = f'name: "{name}" data_type: {self.datatype} dims: [ {self.dims} ]'
        text += " optional: true" if "opt" in self.flags else ""
        text += " allow_ragged_batch: true" if "ragged" in self.flags else ""
        return f"{{ {text}{' reshape: { shape: [ ] }' if 'scalar' in self.flags else ''} }}"


def published_tensors(model: str, release: str) -> Iterator[PublishedTensor]:
    """Of one config of a release, in order."""
    number = RELEASES.index(release)
    types = {
        "COUNT": "TYPE_UINT32" if number < RELEASES.index("0.7.1") else "TYPE_INT32",
        "LOGITS": "${logits_datatype}",
    }
    for line in TENSORS[model].strip().splitlines():
        direction, name, joined, datatype, dims, *flags = line.split()
        first, _, last = next((flag for flag in flags if ".." in flag), "..").partition("..")
        if RELEASES.index(first or RELEASES[0]) <= number <= RELEASES.index(last or RELEASES[-1]):
            datatype = types.get(datatype, f"TYPE_{datatype}")
            yield PublishedTensor(direction, name, joined, datatype, dims, frozenset(flags))


def model_config(model: str, release: str) -> str:
    tensors = list(published_tensors(model, release))
    given = [parameter.partition("=") for parameter in PARAMETERS[model].split()]
    is_engine = model == "tensorrt_llm"
    return Template(MODEL).substitute(
        name=model,
        backend="tensorrtllm" if is_engine else "python",
        policy=ENGINE_POLICY if is_engine else "",
        inputs=", ".join(one.declared(one.name) for one in tensors if one.direction == "in"),
        outputs=", ".join(one.declared(one.name) for one in tensors if one.direction == "out"),
        parameters="\n".join(
            f'parameters {{ key: "{key}" value: {{ string_value: "{value or f"${{{key}}}"}" }} }}'
            for key, _, value in given
        ),
        count=1 if is_engine else f"${{{model}_instance_count}}",
    )


def ensemble_config(release: str) -> str:
    """Its inputs are what the steps read and none of them makes; its outputs what no other step reads."""
    steps = {model: list(published_tensors(model, release)) for model in TENSORS}
    tensors = {(one.direction, one.joined): one for step in steps.values() for one in step}
    inputs = {name: one for (way, name), one in tensors.items() if way == "in" and not name.startswith(("_", "-"))}
    outputs = {name: one for (way, name), one in tensors.items() if way == "out" and not name.startswith(("_", "-"))}

    def end(name: str, one: PublishedTensor) -> str:
        return PublishedTensor("", name, "", one.datatype, one.dims, one.flags & {"opt"}).declared(name)

    def step(model: str) -> str:
        maps = [
            f'{one.direction}put_map {{ key: "{one.name}" value: "{one.joined}" }}'
            for one in steps[model]
            if one.joined != "-"
        ]
        return f'{{ model_name: "{model}" model_version: -1\n  ' + "\n  ".join(maps) + " }"

    return f"""name: "ensemble"
platform: "ensemble"
max_batch_size: ${{triton_max_batch_size}}
input [ {", ".join(end(*entry) for entry in inputs.items())} ]
output [ {", ".join(end(*entry) for entry in outputs.items())} ]
ensemble_scheduling {{ step [ {", ".join(map(step, steps))} ] }}
"""


def write_published_repository(path: Path, filled: Mapping[str, str] = FILLED, release: str = LATER) -> Path:
    """The repository in the new folder `path`, its placeholders filled as fill_template.py does."""
    shutil.copytree(PYTHON_MODELS, path, ignore=shutil.ignore_patterns("__pycache__"))
    configs = {model: model_config(model, release) for model in TENSORS} | {"ensemble": ensemble_config(release)}
    for model, config in configs.items():
        (path / model / "1").mkdir(parents=True, exist_ok=True)
        (path / model / "config.pbtxt").write_text(Template(config).safe_substitute(filled))
    return path
