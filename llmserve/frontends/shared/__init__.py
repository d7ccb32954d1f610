"""What both protocols do alike: extensions of the inference protocol, raw tensors, what they ask of the server core."""
