"""What a user's own text tells a build about the inputs of its matrices."""
