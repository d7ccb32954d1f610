"""In-flight batching in plain Python ints: which tokens of which sequences the next step computes."""
