"""A fake of the part of tensorrt_llm 1.2 that we use, as strict as the real one; see tests/fakes/README.md.

The real one always imports torch. Here the process that builds a rank does without, which saves it two seconds.
"""

from multiprocessing import parent_process

from tensorrt_llm.version import __version__

__all__ = ["__version__"]

if parent_process() is None:
    from tensorrt_llm import operators  # noqa: F401
