"""From repositories to served models: finds, loads, warms up, replaces and unloads them."""
