"""An engine in a process of its own, over a Unix socket.

    frames.py     bytes on the socket <-> frames; the preamble with the protocol's version
    messages.py   frames <-> requests, events, errors, statistics
    client.py     `RemoteEngine`: the `Engine` protocol over one connection; imports little, for it runs anywhere
    server.py     `EngineServer`: one engine for many clients
    child.py      the process, as its parent sees it: started, ready, ended
    process.py    `ProcessEngine`: such a process, started again when it dies

One message per step and direction has the events of all of a client's sequences. Both ends are on one machine, so
numbers travel in its own order of bytes. No library is needed to speak this, so that another environment can, and with
a step's numbers in rows the standard library's is fast enough: `tools/bench_engine_process.py` measures it.
"""
