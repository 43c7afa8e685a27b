"""The routes of kept responses: GET and DELETE /v1/responses/ID, and what is under it.

    routes += KeptResponses(store).routes
"""

from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gpt_faster.server.protocol import ApiError
from gpt_faster.server.response_store import KeptResponse, ResponseStore
from gpt_faster.server.responses import input_item_list

PATH = "/v1/responses/{id}"


class KeptResponses:
    """Each answers 404 for an id that is not kept."""

    def __init__(self, store: ResponseStore):
        self.kept = store
        self.routes = [Route(PATH, self.show_response),
                       Route(PATH, self.delete_response, methods=["DELETE"]),
                       Route(f"{PATH}/input_items", self.input_items),
                       Route(f"{PATH}/cancel", self.cancel_response, methods=["POST"])]

    def kept_response(self, request) -> KeptResponse:
        response_id = request.path_params["id"]
        kept = self.kept.get(response_id)
        if kept is None:
            raise no_response(response_id)
        return kept

    async def show_response(self, request) -> Response:
        """A kept response"""
        if request.query_params.get("stream") == "true":
            raise ApiError(400, "stream is not supported here: only the whole response is kept",
                           param="stream", code="unsupported_parameter")
        return JSONResponse(self.kept_response(request).response)

    async def input_items(self, request) -> Response:
        """The items that a kept response answers"""
        query = {name: request.query_params.get(name) for name in ("limit", "order", "after")}
        return JSONResponse(input_item_list(self.kept_response(request).input_items, **query))

    async def delete_response(self, request) -> Response:
        """Forget a kept response"""
        response_id = request.path_params["id"]
        if not self.kept.delete(response_id):
            raise no_response(response_id)
        return JSONResponse(dict(id=response_id, object="response", deleted=True))

    async def cancel_response(self, request) -> Response:
        """Refused: no response runs in the background"""
        self.kept_response(request)
        raise ApiError(400, "only background responses can be cancelled, and the server has none: "
                       "close the connection to end an answer")


def no_response(response_id: str) -> ApiError:
    return ApiError(404, f"Response with id '{response_id[:100]}' not found.")
