"""Contestants as `worker.LogitsModule`. All but ours run in the peers' environment, without llmserve."""
