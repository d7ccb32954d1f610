"""HTTP/1.1 on the event loop, as much of it as the front ends need: `serve` and what its handlers see.

httptools parses; here is what a server decides itself. General servers and frameworks cost several times what a small
inference does.

connection  one connection, from its start to its end, and what goes out on it
parser      bytes to requests
pipelining  requests in their order
deadlines   how long headers and silence may last
request     what a client asks
answers     what it is told, whole or piece by piece
server      the listening socket
"""
