"""LoRA adapters beside an engine: the sealed directory (`sealed.py`) that `llmserve adapter build` writes."""
