"""The page's server with scripted answers: HTTP, the page and /render are serve.py's, the model's text is a test's."""

import asyncio
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from gpt_faster.server.app import PAGE, HttpServer, Query, RenderRequest, content_security_policy
from gpt_faster.server.metrics import Metrics
from gpt_faster.server.protocol import ApiError
from gpt_faster.server.renderer import Renderer


class ScriptedServer(HttpServer):
    """answers: what the next requests get, deltas or text or an exception; pace: seconds between deltas.

    requests: the bodies that came; renders: the lengths of the texts that /render got.
    """

    def __init__(self, api_key=None):
        self.reset()
        self.options = SimpleNamespace(api_key=api_key, allowed_hosts=[], max_body_mb=8)
        self.metrics, self.loopback, self.wires = Metrics(), False, {}
        self.page, self.renderer, self.n_body_bytes = PAGE.read_bytes(), Renderer(), 0
        self.threads = dict(render=ThreadPoolExecutor(1), long=ThreadPoolExecutor(1))
        self.preparer = SimpleNamespace(limit=100, check_name=lambda name: None)
        render = self.renderer.render
        self.renderer.render = lambda text: (self.renders.append(len(text)), render(text))[1]
        self.page_headers = {"content-security-policy": content_security_policy(self.page)}
        query = Query("/render", RenderRequest, self.render, pool="render")
        routes = [Route("/", self.show_page), Route("/render", partial(self.reply, query=query), methods=["POST"]), Route("/v1/models", self.models),
                  Route("/v1/chat/completions", self.chat, methods=["POST"])]
        self.routes, self.under_v1 = routes, {"models", "chat"}
        self.app = self.middleware(Starlette(routes=routes, exception_handlers={ApiError: self.error_response}))
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        self.uvicorn = uvicorn.Server(uvicorn.Config(self.app, log_level="warning", lifespan="off"))
        self.thread = threading.Thread(target=self.uvicorn.run, args=([listener],), daemon=True)
        self.thread.start()

    def reset(self):
        self.answers, self.requests, self.renders, self.pace = [], [], [], 0.0

    def stop(self):
        self.uvicorn.should_exit = True
        self.thread.join(10)
        self.renderer.close()

    async def models(self, request):
        return JSONResponse(dict(object="list", data=[dict(id="scripted")]))

    async def chat(self, request):
        self.requests.append(await request.json())
        answer = self.answers.pop(0) if self.answers else "Yes."
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, str):
            answer = [dict(content=answer[i:i + 7]) for i in range(0, len(answer), 7)]

        async def stream():
            yield ": keep-alive\n\n"
            for delta in answer:
                if isinstance(delta, Exception):
                    yield f"data: {json.dumps(dict(error=dict(message=str(delta))))}\n\n"
                    return
                yield f"data: {json.dumps(dict(choices=[dict(index=0, delta=delta, finish_reason=None)]))}\n\n"
                await asyncio.sleep(self.pace)
            yield f"data: {json.dumps(dict(choices=[dict(index=0, delta={}, finish_reason='stop')]))}\n\n"
            usage = dict(prompt_tokens=9, completion_tokens=len(answer), prompt_tokens_details=dict(cached_tokens=4))
            yield f"data: {json.dumps(dict(choices=[], usage=usage))}\n\ndata: [DONE]\n\n"
        return StreamingResponse(stream(), media_type="text/event-stream")
