"""Parts of `make bench` and `make bench-peers`, which `tools/bench.py` and `tools/bench_peers.py` start."""
