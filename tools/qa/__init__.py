"""Runs Triton's own tests against llmserve, or against a real Triton: `make qa QA=DIR`."""
