"""gRPC's wire protocol on asyncio: the part of HTTP/2 (RFC 9113) that a gRPC server needs, without an extra thread.

In a Python server based on grpcio, every call crosses several times from the poller's thread to the event loop. Here a
frame is read, handled and written on the loop. `make bench-server` measured 2.6 times as many unary answers per second
as with grpcio's server for 32 clients, 1.9 times for one. `hpack` decodes the header blocks.

    frames.py        bytes of frames; protocol errors
    reader.py        incoming bytes to frames
    flood_limits.py  limits on useless frames
    headers.py       header blocks to request heads, statuses to trailers
    messages.py      DATA to gRPC messages, and back
    sender.py        outgoing data: one piece per turn of the loop, within the client's windows
    call.py          one call, which is its handler's context
    calls.py         the calls of one connection: heads to handlers, handlers to statuses
    expiry.py        deadlines of calls
    keepalive.py     limits on a connection's silence and age
    connection.py    one connection: handles its frames
    server.py        the listening socket
"""
