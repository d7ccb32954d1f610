"""What a text of the user's own tells a build about the inputs of its matrices."""
