"""The model's thread: accepts generations, drives decoding/scheduler.py, and delivers their events.

It owns the bounded queue, deadlines and shutdown. It knows no HTTP: each generation's events go to
its Delivery's `send`, in order.

    engine = Engine(slots, max_queue=64, metrics)
    engine.submit([generation])                    # from any thread; QueueFull, Draining
    engine.run()                                   # in the thread that loaded the model
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gpt_faster.decoding.scheduler import Event, Generation, Scheduler
from gpt_faster.server.metrics import Metrics
from gpt_faster.server.request_id import log_line

DELIVERY_INTERVAL = 0.06                           # seconds: at most 16 deliveries a second


class QueueFull(Exception):
    """The queue is full."""


class Draining(Exception):
    """The server is shutting down: it finishes running generations and accepts no new ones."""


@dataclass(eq=False)
class Delivery:
    """A generation's user_data: where its events go, and its times (time.monotonic()).

    index: of the choice in its request; send(event) is called in the model's thread. turn: its
    place in the queue.
    """

    index: int
    send: Callable[[Event], None]
    deadline: float
    submitted: float = 0.0
    turn: int = 0
    last: float = 0.0                              # time of the last token; 0: none yet
    request_id: str = ""                           # for the log


class Engine:
    """The request queue in front of the slots."""

    def __init__(self, slots: Scheduler, max_queue: int, metrics: Metrics,
                 flush: Callable[[list[Event]], None] = lambda events: None):
        """flush(events): deliver the events of several steps, merged to one per generation."""
        self.slots, self.max_queue, self.metrics, self.flush = slots, max_queue, metrics, flush
        slots.poll = self._poll
        self.lock = threading.Condition()
        self.inbox, self.cancelled = deque(), set()
        self.n_request = 0
        self.active = {}                           # unfinished generations, as an ordered set
        self.events, self.flush_now, self.last_flush = {}, False, 0.0      # by generation
        self.draining = self.dead = False

    # ---- From other threads ---------------------------------------------------------------------

    def submit(self, new: list[Generation]) -> None:
        """Queue a request's generations. QueueFull if they do not all fit, Draining during
        shutdown. Its i-th choice waits as a request would that came i requests later: many choices
        hold up no other request.
        """
        with self.lock:
            if self.draining:
                raise Draining
            n_waiting = len(self.inbox) + self.slots.n_waiting()
            n_free = self.slots.batch.n_row - len(self.slots.running) - len(self.slots.prefilling)
            if n_waiting + len(new) > self.max_queue + max(0, n_free):
                raise QueueFull
            now = time.monotonic()
            self.n_request += 1
            for i, generation in enumerate(new):
                generation.user_data.submitted = now
                generation.user_data.turn = self.n_request + i
            self.inbox.extend(new)
            self.lock.notify()

    def cancel(self, generations: list[Generation]) -> None:
        """The client disconnected. Finished generations are ignored."""
        with self.lock:
            self.cancelled.update(generations)
            self.lock.notify()

    def drain(self) -> None:
        """Accept nothing new; run() returns when all are finished. Signal-safe: takes no lock."""
        self.draining = True

    def load(self) -> tuple[int, int]:
        """-> how many sequences run, and how many wait."""
        slots = self.slots
        return len(slots.running) + len(slots.prefilling), slots.n_waiting() + len(self.inbox)

    # ---- The model's thread ---------------------------------------------------------------------

    def run(self) -> None:
        """Serve until drain() was called and all accepted generations are finished."""
        try:
            while True:
                with self.lock:
                    while not (self.draining or self.cancelled or self._has_work()):
                        self.lock.wait(0.2)        # poll: drain() does not notify
                    if self.draining and not self._has_work():
                        break
                for event in self.slots.run():
                    self._handle(event)
                self._poll()
        finally:
            self.dead = self.draining = True
            with self.lock:
                self.active.update(dict.fromkeys(self.inbox))
            for generation in list(self.active):
                self._finish(generation, error="the server has stopped")
            self._deliver()

    def _has_work(self) -> bool:
        """slots.waiting: moved there by _poll() after slots.run() had returned."""
        return bool(self.inbox or self.slots.waiting)

    def _poll(self) -> None:
        """Between two model calls: accept new generations, end cancelled and expired ones."""
        self._deliver()
        with self.lock:
            new, cancelled = list(self.inbox), self.cancelled
            self.inbox.clear()
            self.cancelled = set()
            if new:
                waiting = sorted([*self.slots.waiting, *new], key=lambda g: g.user_data.turn)
                self.slots.waiting = deque(waiting)
        self.active.update(dict.fromkeys(new))
        for generation in cancelled & self.active.keys():
            self._finish(generation, finish_reason="cancelled")
        now = time.monotonic()
        for generation in [g for g in self.active if g.user_data.deadline < now]:
            self._finish(generation, error="timeout")
        running, waiting = self.load()
        self.metrics.running.set(running)
        self.metrics.waiting.set(waiting)

    def _handle(self, event: Event) -> None:
        generation = event.generation
        if generation not in self.active:
            return
        if event.error is not None:
            log_line(f"serve.py: error: request failed: {type(event.error).__name__}: "
                     f"{str(event.error).splitlines()[0] if str(event.error) else ''}",
                     generation.user_data.request_id)
            self._finish(generation, error="internal")
            return
        self.metrics.token(generation, time.monotonic())
        first = len(generation.ids) == 1
        self.flush_now |= first or event.finish_reason is not None
        if event.finish_reason:
            del self.active[generation]
            self.metrics.drafts(generation)
        self._add(event)
        if first:                                  # a decode step runs before the next _poll()
            self._deliver()

    def _finish(self, generation: Generation, finish_reason: str | None = None,
             error: str | None = None) -> None:
        self.slots.drop(generation)
        if generation in self.active:
            del self.active[generation]
            self.metrics.drafts(generation)
        self._add(Event(generation, finish_reason=finish_reason, error=error))
        self.flush_now = True

    def _add(self, event: Event) -> None:
        """Merge the event into the undelivered one of its generation."""
        if pending := self.events.get(event.generation):
            event = event._replace(text=pending.text + event.text,
                                   thoughts=pending.thoughts + event.thoughts,
                                   logprobs=pending.logprobs + event.logprobs)
        self.events[event.generation] = event

    def _deliver(self) -> None:
        """First and last tokens at once, others batched: each flush wakes the HTTP thread."""
        now = time.monotonic()
        if self.events and (self.flush_now or now - self.last_flush >= DELIVERY_INTERVAL):
            events, self.events = self.events, {}
            self.flush_now, self.last_flush = False, now
            self.flush(list(events.values()))
