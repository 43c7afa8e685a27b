"""The /metrics endpoint, in Prometheus' text format.

    metrics = Metrics(); metrics.running.set(3); metrics.text()
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)


class Metrics:
    def __init__(self):
        self.registry = CollectorRegistry()

        def make(kind, name, text, *labels, **more):
            return kind(f"gpt_faster_{name}", text, labels, registry=self.registry, **more)

        self.requests = make(Counter, "requests", "HTTP requests", "path", "status")
        self.prompt_tokens = make(Counter, "prompt_tokens", "prompt tokens")
        self.cached_tokens = make(Counter, "cached_tokens", "prompt tokens found in the KV cache")
        self.new_tokens = make(Counter, "new_tokens", "generated tokens")
        self.draft_rounds = make(Counter, "draft_rounds", "rounds with drafts, of all sequences")
        self.accepted_drafts = make(Counter, "accepted_draft_tokens", "accepted draft tokens")
        self.running = make(Gauge, "running", "sequences running in a slot")
        self.waiting = make(Gauge, "waiting", "sequences waiting for a slot")
        self.slots = make(Gauge, "slots", "slots: sequences that can run at a time")
        self.first = make(Histogram, "time_to_first_token_seconds",
                          "seconds from submission to the first token", buckets=SECONDS)
        self.between = make(Histogram, "time_between_tokens_seconds",
                            "seconds between two tokens", buckets=SECONDS)

    def token(self, generation, now: float) -> None:
        """Count one new token of a generation, at time.monotonic() = now."""
        delivery = generation.user_data
        self.new_tokens.inc()
        if delivery.last:
            self.between.observe(now - delivery.last)
        else:
            self.first.observe(now - delivery.submitted)
            self.prompt_tokens.inc(len(generation.prompt_ids))
            self.cached_tokens.inc(generation.n_reused)
        delivery.last = now

    def drafts(self, generation) -> None:
        """Count the drafts of a generation that has ended."""
        self.draft_rounds.inc(generation.n_rounds)
        self.accepted_drafts.inc(generation.n_accepted)

    def text(self) -> bytes:
        return generate_latest(self.registry)
