"""The gain of prompt lookup in other engines. Each file runs in an environment that has the engine."""
