"""Records of what is done with requests and how long it takes: statistics, histograms, traces. `observe` shows them."""
