"""What `make bench` and `make bench-peers` are made of; `tools/bench.py` and `tools/bench_peers.py` begin them."""
