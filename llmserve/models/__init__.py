"""Definitions of networks: specs, parameters and the traced Program. One file per architecture."""
