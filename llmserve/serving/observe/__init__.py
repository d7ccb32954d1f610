"""What the server tells about itself: the metrics of models, tenants and the machine."""
