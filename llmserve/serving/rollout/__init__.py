"""Rollouts: a candidate version of a model is compared with the stable one, then promoted or rolled back."""
