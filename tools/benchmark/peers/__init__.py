"""Other engines as `tools.benchmark.cells.Model`. These modules run in their own environment, without llmserve."""
