"""Devices that a Program can be compiled for."""
