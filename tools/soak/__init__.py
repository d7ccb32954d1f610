"""An hour of steady load on one server: `make soak`."""
