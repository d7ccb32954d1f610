"""What prompt lookup is worth to other engines. Each file runs in an environment that has the engine."""
