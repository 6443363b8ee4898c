"""A card, a worker and times for tests of tuning without a GPU."""

from collections.abc import Callable

from attn_jax.kernels import card
from attn_jax.kernels.tune.trial import PROBLEMS
from attn_jax.kernels.worker import Worker

H200 = {
    **{"device": "NVIDIA H200", "platform": "gpu", "capability": "9.0"},
    **{"multiprocessors": 132, "versions": {"jax": "0.11.2"}, "driver": "580"},
}


class FakeWorker(Worker):
    """Calls in this process. `described` is the card; `calls` are the others."""

    def __init__(self, described=H200):
        super().__init__()
        self.described, self.calls, self.ended = described, [], 0

    def end(self):
        self.ended += 1

    def call(self, function: Callable, *arguments, seconds):
        if function is card.describe:
            return self.described
        self.calls.append((arguments, seconds))
        return function(*arguments)


# Of all groups.
ALL = {problem for found in PROBLEMS.values() for problem in found}


def measured(ratio: float, again: float = 1.0) -> dict:
    times = {
        "ms": 1.0,
        "present_ms": ratio,
        "ratio": ratio,
        "again": again,
        "rounds": 5,
    }
    return {"refused": None, "times": {p.name: times for p in ALL}}
