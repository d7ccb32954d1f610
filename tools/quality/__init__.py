"""What `make bench-quality` is made of; `tools/bench_quality.py` begins it."""
