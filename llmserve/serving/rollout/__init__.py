"""Rollouts: a candidate version of a model beside the stable one, compared with it, then promoted or rolled back."""
