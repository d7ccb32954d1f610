"""Load for a running server, and what it makes of it: `llmserve bench`.

lengths.py, arrivals.py   what is drawn: tokens of prompts and answers, the times of requests
workload.py               the requests themselves
http_client.py            an HTTP/1.1 connection that knows when each piece came
openai_endpoint.py        asks over /v1;  grpc_endpoint.py over Triton's gRPC
load.py                   sends requests when they are due, and keeps an eye on itself
records.py, summary.py    what came of each request, and of all of them, in aiperf's terms
plot.py                   a sweep, drawn
"""
