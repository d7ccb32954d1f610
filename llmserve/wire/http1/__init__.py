"""HTTP/1.1 on the event loop, as much of it as the front ends need: `serve` and what its handlers see.

httptools parses; here is what a server decides itself. General servers and frameworks cost several times what a small
inference does.

connection  one connection: requests in their order, limits on headers and silence
request     what a client asks
answers     what it is told, whole or piece by piece
server      the listening socket, and the end of what came through it
"""
