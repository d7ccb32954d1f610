"""The text APIs over the server core's ensembles: OpenAI's, Anthropic's messages and Ollama's chat.

front_end     the handler of their paths: creates the application at the first request
application   the FastAPI application: routes, schema
requests/     parses bodies to pydantic models; served models; conversations and tools as inputs of ensembles
answers/      converts a prompt to an `InferRequest`, its responses to pieces, parts and server-sent events; errors
openai/       one folder for each API: its fields, routes and documents
anthropic/
ollama/
"""
