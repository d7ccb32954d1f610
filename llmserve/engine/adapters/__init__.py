"""LoRA adapters of an engine: the sealed directory (`sealed.py`) that `llmserve adapter build` writes."""
