"""Builds wheels for Linux machines without a compiler: `make wheels`.

__main__.py  compiles them, one for each kind of processor
zig.cmake    the toolchain: Zig's clang, for an older glibc than this machine's
trial.py     installs one in a new environment without a compiler, builds an engine there and serves it
"""
