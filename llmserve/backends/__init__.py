"""Backends: what executes models behind `llmserve.serving.backend`. One package each."""
