from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class UtilsSamplingParams:
    """Of a request, what the PyTorch sampler draws by. Without a word it ignores whatever is not here or a penalty."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    use_beam_search: bool | None
    min_p: float | None = None
    length_penalty: float | None = None
    beam_search_diversity_rate: float | None = None
    early_stopping: int | None = None
