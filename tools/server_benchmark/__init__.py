"""What `tools/bench_server.py` is made of: the models, a load generator that costs little, and the report."""
