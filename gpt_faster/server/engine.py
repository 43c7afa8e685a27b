"""The model's thread: takes requests in, drives decoding/scheduler.py, and hands tokens back.

It owns the queue and its bound, deadlines, and the end. It knows no HTTP: a Delivery's `send` takes
what becomes of a generation, in the order in which it happens.

    engine = Engine(slots, max_queue=64, metrics)
    engine.submit([generation])                    # any thread; Busy, Draining
    engine.run()                                   # the thread that loaded the model
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from generate import log
from gpt_faster.decoding.scheduler import Event, Generation, Scheduler
from gpt_faster.server.metrics import Metrics

TOGETHER_SECONDS = 0.06                            # 16 times a second text still looks as it flows


class Busy(Exception):
    """The queue is full."""


class Draining(Exception):
    """The server finishes what runs, and takes nothing new."""


@dataclass(eq=False)
class Delivery:
    """A generation's `about`: which of a request's answers it is, send(event) in the model's
    thread, and when it must have ended and was submitted, of time.monotonic()."""

    index: int
    send: Callable[[Event], None]
    deadline: float
    submitted: float = 0.0
    last: float = 0.0                              # its last token; 0: none yet


class Engine:
    """The queue before the slots."""

    def __init__(self, slots: Scheduler, max_queue: int, metrics: Metrics,
                 flush: Callable[[list[Event]], None] = lambda events: None):
        """flush(events): delivers what some steps gave, one event a generation."""
        self.slots, self.max_queue, self.metrics, self.flush = slots, max_queue, metrics, flush
        slots.poll = self._arrivals
        self.lock = threading.Condition()
        self.inbox, self.cancelled = deque(), set()
        self.live = {}                             # all that have not ended, as keys
        self.events, self.urgent, self.delivered = {}, False, 0.0      # by generation
        self.draining = self.dead = False

    # ---- From other threads ---------------------------------------------------------------------

    def submit(self, new: list[Generation]) -> None:
        """Busy where they do not fit into the queue beside those that wait."""
        with self.lock:
            if self.draining:
                raise Draining
            n_waiting = len(self.inbox) + self.slots.n_waiting()
            n_free = self.slots.batch.n_row - len(self.slots.running) - len(self.slots.prefilling)
            if n_waiting + len(new) > self.max_queue + max(0, n_free):
                raise Busy
            now = time.monotonic()
            for generation in new:
                generation.user_data.submitted = now
            self.inbox.extend(new)
            self.lock.notify()

    def cancel(self, generations: list[Generation]) -> None:
        """Whoever wanted them has left. Those that have ended are left alone."""
        with self.lock:
            self.cancelled.update(generations)
            self.lock.notify()

    def drain(self) -> None:
        """Take nothing new, and end when all has ended. From a signal handler too: no lock."""
        self.draining = True

    def load(self) -> tuple[int, int]:
        """How many run and how many wait."""
        slots = self.slots
        return len(slots.running) + len(slots.prefilling), slots.n_waiting() + len(self.inbox)

    # ---- The model's thread ---------------------------------------------------------------------

    def run(self) -> None:
        """Until drain(), and until what was taken in has ended."""
        try:
            while True:
                with self.lock:
                    while not (self.draining or self.cancelled or self._has_more()):
                        self.lock.wait(0.2)        # in short: a signal handler sets draining
                    if self.draining and not self._has_more():
                        break
                for event in self.slots.run():
                    self._take(event)
                self._arrivals()
        finally:
            self.dead = self.draining = True
            with self.lock:
                self.live.update(dict.fromkeys(self.inbox))
            for generation in list(self.live):
                self._end(generation, error="the server has stopped")
            self._deliver()

    def _has_more(self) -> bool:
        """Also what came when the slots had just run out of work, and has been taken in since."""
        return bool(self.inbox or self.slots.waiting)

    def _arrivals(self) -> None:
        """Between two calls of the model: who came, who left, whose time is over."""
        self._deliver()
        with self.lock:
            new, gone = list(self.inbox), self.cancelled
            self.inbox.clear()
            self.cancelled = set()
            self.slots.waiting.extend(new)
        self.live.update(dict.fromkeys(new))
        for generation in gone & self.live.keys():
            self._end(generation, finish_reason="cancelled")
        now = time.monotonic()
        for generation in [each for each in self.live if each.user_data.deadline < now]:
            self._end(generation, error="timeout")
        running, waiting = self.load()
        self.metrics.running.set(running)
        self.metrics.waiting.set(waiting)

    def _take(self, event: Event) -> None:
        generation = event.generation
        if generation not in self.live:
            return
        if event.error is not None:
            log(f"serve.py: error: a request failed: {type(event.error).__name__}: "
                f"{str(event.error).splitlines()[0] if str(event.error) else ''}")
            self._end(generation, error="internal")
            return
        self.metrics.token(generation, time.monotonic())
        first = len(generation.ids) == 1
        self.urgent |= first or event.finish_reason is not None
        if event.finish_reason:
            del self.live[generation]
        self._add(event)
        if first:                                  # a step of all runs before the next arrivals
            self._deliver()

    def _end(self, generation: Generation, finish_reason: str | None = None,
             error: str | None = None) -> None:
        self.slots.drop(generation)
        self.live.pop(generation, None)
        self._add(Event(generation, finish_reason=finish_reason, error=error))
        self.urgent = True

    def _add(self, event: Event) -> None:
        """To what waits of this generation already."""
        if before := self.events.get(event.generation):
            event = event._replace(text=before.text + event.text,
                                   logprobs=before.logprobs + event.logprobs)
        self.events[event.generation] = event

    def _deliver(self) -> None:
        """First tokens and ends at once, others together: each delivery wakes the other thread."""
        now = time.monotonic()
        if self.events and (self.urgent or now - self.delivered >= TOGETHER_SECONDS):
            events, self.events = self.events, {}
            self.urgent, self.delivered = False, now
            self.flush(list(events.values()))
