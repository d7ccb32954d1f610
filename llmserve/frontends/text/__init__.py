"""The text APIs over the server core's ensembles: OpenAI's, and beside it Anthropic's messages and Ollama's chat.

front_end     the handler of their paths: makes the application when the first request comes
application   the FastAPI application: routes, schema
requests/     bodies to pydantic models; models that are served; conversations and tools, as ensembles take them
answers/      a prompt to an `InferRequest`, its responses to pieces, parts and server-sent events; errors
openai/       one folder for each dialect: its fields, routes and documents
anthropic/
ollama/
"""
