"""A model repository as tensorrtllm_backend publishes one (0.10 to 0.12), and how its users set it up.

`repository/` is written after it: the same models, configs with the same tensors and placeholders, the same calls of
transformers. None of its files is copied.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from string import Template

REPOSITORY = Path(__file__).with_name("repository")
# What its README fills in with fill_template.py; the other placeholders stay as they are.
FILLED = {
    "triton_max_batch_size": "64",
    "decoupled_mode": "True",
    "max_queue_delay_microseconds": "0",
    "preprocessing_instance_count": "1",
    "postprocessing_instance_count": "1",
    "batching_strategy": "inflight_fused_batching",
    "exclude_input_in_output": "True",
    "engine_dir": "/engines/of/another/machine",
    "tokenizer_dir": "/tokenizers/of/another/machine",
}


def write_published_repository(path: Path, filled: Mapping[str, str] = FILLED) -> Path:
    """The repository in the new folder `path`, its placeholders filled as fill_template.py does."""
    shutil.copytree(REPOSITORY, path, ignore=shutil.ignore_patterns("__pycache__"))
    for config in path.glob("*/config.pbtxt"):
        config.write_text(Template(config.read_text()).safe_substitute(filled))
    return path
