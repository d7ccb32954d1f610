"""What has been done and how long it took: statistics, traces, metrics."""
