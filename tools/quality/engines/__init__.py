"""Contestants behind `worker.LogitsModule`. All but ours run in the environment of the peers, without llmserve."""
