"""A streamed answer over HTTP, with nothing but the standard library: http_client.py TEXT."""

import json
import sys
import urllib.request

messages = json.dumps([{"role": "user", "content": sys.argv[1]}])
request = {"messages": messages, "max_tokens": 24, "stream": True}
url = "http://localhost:8000/v2/models/ensemble/generate_stream"
num_events = 0
with urllib.request.urlopen(url, json.dumps(request).encode(), timeout=60) as answer:
    for line in answer:
        if line.startswith(b"data: "):
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                sys.exit(event["error"])
            print(event["text_output"], end="", flush=True)
            num_events += 1
print()
assert num_events > 1
