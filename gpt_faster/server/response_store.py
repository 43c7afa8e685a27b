"""Responses kept in memory for previous_response_id and GET /v1/responses/{id}.

Bounded by number, bytes and age; the least recently used one goes first. It knows no HTTP and no
model, and may be called from any thread.

    store = ResponseStore(max_number=256, max_bytes=64_000_000, max_seconds=3600)
    store.put(KeptResponse(response, input_items, history, n_bytes))
    kept = store.get("resp_…")                     # None: unknown, deleted or expired
"""

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass


@dataclass
class KeptResponse:
    """A response object, its request's input items, and the items of earlier turns.

    n_bytes: of all of these as JSON, although conversations share the items of earlier turns.
    """

    response: dict
    input_items: list[dict]
    history: list[dict]
    n_bytes: int
    last_use: float = 0.0

    def __post_init__(self):
        self.inputs = {item["id"]: item for item in self.input_items}
        self.outputs = {item["id"]: item for item in self.response["output"]}

    def conversation(self) -> list[dict]:
        """All items up to the end of this response."""
        return [*self.history, *self.input_items, *self.response["output"]]


class ResponseStore:
    """Keeps the responses used last."""

    def __init__(self, max_number: int, max_bytes: int, max_seconds: float, clock=time.monotonic):
        self.max_number, self.max_bytes, self.max_seconds = max_number, max_bytes, max_seconds
        self.clock, self.lock = clock, threading.Lock()
        self.kept = OrderedDict()                  # id -> KeptResponse, least recently used first
        self.n_bytes = 0

    def put(self, kept: KeptResponse) -> bool:
        """Keep a response -> False if it alone is beyond the limits."""
        if self.max_number == 0 or kept.n_bytes > self.max_bytes:
            return False
        with self.lock:
            kept.last_use = self.clock()
            self.kept[kept.response["id"]] = kept
            self.n_bytes += kept.n_bytes
            self._evict()
        return True

    def get(self, response_id: str) -> KeptResponse | None:
        with self.lock:
            self._evict()
            return self._use(response_id)

    def delete(self, response_id: str) -> bool:
        """-> False if it was not there."""
        with self.lock:
            self._evict()
            return self._remove(response_id)

    def item(self, item_id: str) -> dict | None:
        """The item with this id, of any response that is kept. Outputs first: their ids are the
        server's, those of inputs may be a client's."""
        with self.lock:
            self._evict()
            for part in ("outputs", "inputs"):
                for response_id, kept in reversed(self.kept.items()):
                    items = getattr(kept, part)
                    if item_id in items:
                        self._use(response_id)
                        return items[item_id]
        return None

    def _use(self, response_id: str) -> KeptResponse | None:
        kept = self.kept.get(response_id)
        if kept:
            kept.last_use = self.clock()
            self.kept.move_to_end(response_id)
        return kept

    def _remove(self, response_id: str) -> bool:
        kept = self.kept.pop(response_id, None)
        self.n_bytes -= kept.n_bytes if kept else 0
        return kept is not None

    def _evict(self) -> None:
        oldest_use = self.clock() - self.max_seconds
        while self.kept:
            response_id, kept = next(iter(self.kept.items()))
            is_over = len(self.kept) > self.max_number or self.n_bytes > self.max_bytes
            if not is_over and kept.last_use >= oldest_use:
                return
            self._remove(response_id)
