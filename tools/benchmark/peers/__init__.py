"""Other engines behind `benchmark.model.Model`. These modules run in an environment of their own, without llmserve."""
