"""Wheels for Linux machines that have no compiler: `make wheels`.

__main__.py  compiles them, one for each kind of processor
zig.cmake    with what: Zig's clang, for a glibc older than this machine's
trial.py     installs one in a fresh environment where no compiler is found, builds an engine there and serves it
"""
