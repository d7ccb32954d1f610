"""How the requests of one model reach its instances."""
