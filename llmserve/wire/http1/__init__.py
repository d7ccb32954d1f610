"""HTTP/1.1 on the event loop, limited to what the front ends need: `serve`, and the interface for its handlers.

httptools parses; this package does the rest. General servers and frameworks cost several times as much as a small
inference.

connection  one connection, from its start to its end, and its outgoing data
parser      bytes to requests
pipelining  requests in their order
deadlines   time limits for headers, unread answers and idle connections
request     one request
answers     its answer, sent whole or piece by piece
server      the listening socket
"""
