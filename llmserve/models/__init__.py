"""What a network is: specs, parameters and the traced Program. One file per architecture."""
