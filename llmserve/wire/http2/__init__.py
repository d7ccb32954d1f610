"""gRPC's wire on asyncio: as much of HTTP/2 (RFC 9113) as a gRPC server needs, without a thread of its own.

In a Python server over grpcio every call crosses several times from its poller's thread to the event loop. Here a frame
is read, handled and written on the loop. `make bench-server` found 2.6 times as many unary answers per second as with
grpcio's server for 32 clients, 1.9 times for one. `hpack` reads the header blocks.

    frames.py        bytes of frames; what a peer did wrong
    reader.py        what comes in: bytes to frames
    flood_limits.py  how much of what is of no use
    headers.py       header blocks to request heads, statuses to trailers
    messages.py      DATA to gRPC messages, and back
    sender.py        what goes out: one piece per turn of the loop, within the client's windows
    call.py          one call, which is its handler's context
    calls.py         those of one connection: heads to handlers, handlers to statuses
    expiry.py        when the time of calls is over
    keepalive.py     how long a connection may be silent, and live
    connection.py    one connection: what its frames mean
    server.py        the methods, the listening socket, the end
"""
