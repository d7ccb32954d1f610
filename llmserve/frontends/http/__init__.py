"""KServe v2 over HTTP, and the metrics port."""
