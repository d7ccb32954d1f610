"""Parts of `make bench-quality`, which `tools/bench_quality.py` starts."""
