"""`llmserve bench`."""

from llmserve.cli.bench.options import command

__all__ = ["command"]
