"""serve.py's HTTP server: requests, the engine thread, responses, the chat page."""
