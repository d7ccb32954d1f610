"""An engine in its own process, over a Unix socket.

    frames.py     bytes on the socket <-> frames; the preamble with the protocol's version
    messages.py   frames <-> requests, events, errors, statistics
    client.py     `RemoteEngine`: the `Engine` protocol over one connection; imports little, for it runs anywhere
    server.py     `EngineServer`: one engine for many clients
    child.py      the process from its parent's side: started, ready, ended
    process.py    `ProcessEngine`: such a process, restarted if it dies

One message per step and direction has the events of all of a client's sequences. Both ends are on one machine, so
numbers have its byte order. The protocol needs only the standard library, so that clients can run in another
environment. With a step's numbers in rows, it is fast enough: `tools/bench_engine_process.py` measures it.
"""
