"""Engine directory -> tokens."""
