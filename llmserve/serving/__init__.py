"""The server core: models, tensors, scheduling. It knows neither language nor wire."""
