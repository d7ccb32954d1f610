"""Sockets to requests: HTTP/1.1, HTTP/2 and TLS on the event loop. Knows neither models nor protocols above HTTP."""
