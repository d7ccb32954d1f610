"""OpenAI's API, and what is spoken beside it (Anthropic's messages, Ollama's chat), over the server core's ensembles.

front_end     the handler of its paths: makes the application when the first request comes
application   the FastAPI application: routes, schema
validation    a request's body to its pydantic model; refusals in the protocol's words
ensembles     which models it serves, and what their config lets a client say
generation    a prompt to an `InferRequest`, responses to pieces of an answer
messages      conversations, as the ensembles take them
event_stream  pieces to server-sent events
failures      errors in each protocol's shape
limits        what a key may still ask for, as headers
"""
