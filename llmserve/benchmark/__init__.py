"""`llmserve bench`: sends load to a running server and measures its answers.

lengths.py, arrivals.py   random values: tokens of prompts and answers, and times of requests
workload.py               the requests themselves
http_client.py            an HTTP/1.1 connection that records when each piece arrived
openai_endpoint.py        sends requests over /v1;  grpc_endpoint.py over Triton's gRPC
load.py                   sends requests when they are due, and measures its own delays
records.py, summary.py    the result of each request, and of all of them, in aiperf's terms
plot.py                   the chart of a sweep
"""
