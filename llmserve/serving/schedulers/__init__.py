"""Schedulers: give the requests of a model to its instances."""
