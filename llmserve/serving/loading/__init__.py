"""Repositories to served models: found, loaded, warmed up, replaced, unloaded."""
