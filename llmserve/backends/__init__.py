"""Backends execute models behind `llmserve.serving.backend`. Each is a package."""
