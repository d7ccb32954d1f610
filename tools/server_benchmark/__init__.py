"""Parts of `tools/bench_server.py`: models, a load generator that uses little CPU time, and the report."""
