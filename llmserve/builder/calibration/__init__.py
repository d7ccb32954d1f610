"""Calibration: measures the inputs of a build's matrices on a user's own text."""
