"""Records of requests and how long they take: statistics, histograms, traces. `observe` shows them."""
