from typing import Any


def has_occurrence_penalty(sampling_config: Any) -> bool:
    return (
        sampling_config.repetition_penalty not in (None, 1.0)
        or sampling_config.presence_penalty not in (None, 0.0)
        or sampling_config.frequency_penalty not in (None, 0.0)
    )
