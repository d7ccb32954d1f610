"""The server's metrics of models, tenants and the machine."""
