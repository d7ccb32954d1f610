"""KServe v2 over gRPC, and the standard health service."""
