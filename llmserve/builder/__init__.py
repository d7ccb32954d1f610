"""Checkpoint -> engine directory."""
