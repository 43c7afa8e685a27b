"""How an API of the server writes its errors and its streams; each route names its own.

    wire = OpenAIWire()
    wire.frame({"choices": […]})                   # 'data: {"choices": …}\n\n'
"""

import json

from gpt_faster.server.protocol import ApiError


class OpenAIWire:
    """Errors as {"error": …}; server-sent events without names, and [DONE] after the last one."""

    end = "data: [DONE]\n\n"
    keep_alive = ": keep-alive\n\n"                # a comment, which clients of the standard skip

    def error(self, error: ApiError) -> dict:
        """The body of an error response, and the event that ends a stream in which it occurs."""
        return dict(error=error.error)

    def frame(self, event: dict) -> str:
        return f"data: {json.dumps(event)}\n\n"


OPENAI = OpenAIWire()
