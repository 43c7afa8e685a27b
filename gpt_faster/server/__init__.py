"""The HTTP side of serve.py: requests, their turns on the model, answers, the page."""
