"""The model's thread: takes requests in, drives decoding/slots.py, and hands tokens back.

It owns the queue and its bound, deadlines, and the end. It knows no HTTP: a Job's `send` takes what
becomes of it, in the order in which it happens.

    engine = Engine(slots, max_queue=64, metrics)
    engine.submit([job])                           # any thread; Busy, Draining
    engine.run()                                   # the thread that loaded the model
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from generate import log
from gpt_faster.decoding.slots import Event, Logprobs, Slots, Task
from gpt_faster.server.metrics import Metrics

TOGETHER_SECONDS = 0.06                            # 16 times a second text still looks as it flows


class Busy(Exception):
    """The queue is full."""


class Draining(Exception):
    """The server finishes what runs, and takes nothing new."""


class Piece(NamedTuple):
    """What some tokens added. text: to show now, perhaps none, as it may begin a stop string;
    logprobs: of each token, with its id, where they are wanted."""

    job: "Job"
    text: str = ""
    logprobs: tuple[tuple[int, Logprobs], ...] = ()
    finish_reason: str | None = None
    error: str | None = None


@dataclass(eq=False)
class Job:
    """One answer of a request. send(pieces) is called in the model's thread."""

    task: Task
    index: int                                     # among the request's answers
    send: Callable[[Piece], None]
    deadline: float                                # of time.monotonic()
    submitted: float = 0.0
    first: float = 0.0
    last: float = 0.0


class Engine:
    """The queue before the slots."""

    def __init__(self, slots: Slots, max_queue: int, metrics: Metrics,
                 flush: Callable[[list[Piece]], None] = lambda pieces: None):
        """flush(pieces): delivers what some steps gave, one piece a job."""
        self.slots, self.max_queue, self.metrics, self.flush = slots, max_queue, metrics, flush
        slots.arrivals = self._arrivals
        self.lock = threading.Condition()
        self.inbox, self.cancelled = deque(), set()
        self.jobs = {}                             # task -> job, of all that have not ended
        self.pieces, self.urgent, self.delivered = {}, False, 0.0      # by job
        self.draining = self.dead = False

    # ---- From other threads ---------------------------------------------------------------------

    def submit(self, jobs: list[Job]) -> None:
        """Busy where they do not fit into the queue beside those that wait."""
        with self.lock:
            if self.draining:
                raise Draining
            n_waiting = len(self.inbox) + self.slots.n_waiting()
            n_free = self.slots.batch.n_row - len(self.slots.running) - len(self.slots.beginning)
            if n_waiting + len(jobs) > self.max_queue + max(0, n_free):
                raise Busy
            now = time.monotonic()
            for job in jobs:
                job.submitted = now
            self.inbox.extend(jobs)
            self.lock.notify()

    def cancel(self, jobs: list[Job]) -> None:
        """Whoever wanted them has left. Those that have ended are left alone."""
        with self.lock:
            self.cancelled.update(jobs)
            self.lock.notify()

    def drain(self) -> None:
        """Take nothing new, and end when all has ended. From a signal handler too: no lock."""
        self.draining = True

    def load(self) -> tuple[int, int]:
        """How many run and how many wait."""
        slots = self.slots
        return len(slots.running) + len(slots.beginning), slots.n_waiting() + len(self.inbox)

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
                self.jobs.update((job.task, job) for job in self.inbox)
            for job in list(self.jobs.values()):
                self._end(job, error="the server has stopped")
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
            self.slots.waiting.extend(job.task for job in new)
        self.jobs.update((job.task, job) for job in new)
        for job in gone:
            if job.task in self.jobs:
                self._end(job, finish_reason="cancelled")
        now = time.monotonic()
        for job in [job for job in self.jobs.values() if job.deadline < now]:
            self._end(job, error="timeout")
        running, waiting = self.load()
        self.metrics.running.set(running)
        self.metrics.waiting.set(waiting)

    def _take(self, event: Event) -> None:
        job = self.jobs.get(event.task)
        if job is None:
            return
        if event.error is not None:
            log(f"serve.py: error: a request failed: {type(event.error).__name__}: "
                f"{str(event.error).splitlines()[0] if str(event.error) else ''}")
            self._end(job, error="internal", keep=False)
            return
        sequence, now = event.task.sequence, time.monotonic()
        self.metrics.token(job, now)
        try:
            text = sequence.push(event.token_id)
        except Exception as e:                     # whatever a tokenizer does with odd ids
            log(f"serve.py: error: a request failed: {type(e).__name__}: {e}")
            self._end(job, error="internal", keep=False)
            return
        logprobs = ((event.token_id, event.logprobs),) if event.logprobs else ()
        first = len(sequence.ids) == 1
        self.urgent |= first or sequence.finish_reason is not None
        if sequence.finish_reason:
            self.slots.drop(event.task)
            del self.jobs[event.task]
        self._add(Piece(job, text, logprobs, sequence.finish_reason))
        if first:                                  # a step of all runs before the next arrivals
            self._deliver()

    def _end(self, job: Job, finish_reason: str | None = None, error: str | None = None,
             keep: bool = True) -> None:
        self.slots.drop(job.task, keep)
        self.jobs.pop(job.task, None)
        self._add(Piece(job, finish_reason=finish_reason, error=error))
        self.urgent = True

    def _add(self, piece: Piece) -> None:
        """To what waits of this job already."""
        if before := self.pieces.get(piece.job):
            piece = piece._replace(text=before.text + piece.text,
                                   logprobs=before.logprobs + piece.logprobs)
        self.pieces[piece.job] = piece

    def _deliver(self) -> None:
        """First tokens and ends at once, others together: each delivery wakes the other thread."""
        now = time.monotonic()
        if self.pieces and (self.urgent or now - self.delivered >= TOGETHER_SECONDS):
            pieces, self.pieces = self.pieces, {}
            self.urgent, self.delivered = False, now
            self.flush(list(pieces.values()))
