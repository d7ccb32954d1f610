"""The wire: gRPC, HTTP and metrics. Front ends convert and delegate; none of them knows a model."""
