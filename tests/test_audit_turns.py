"""Which thread does what, where each has a process of its own."""

import concurrent.futures
import contextlib
import functools
import threading

import pytest

from attn_jax.audit.turns import Turns

SECONDS = 50


@contextlib.contextmanager
def turns(count=2):
    found = Turns(count)
    try:
        yield found
    finally:
        found.shutdown()


class Held:
    """Work that lasts until it is let go; `begun` when it is at work."""

    def __init__(self):
        self.begun, self.free = threading.Event(), threading.Event()

    def __call__(self):
        self.begun.set()
        assert self.free.wait(SECONDS)
        return threading.get_ident()


def test_what_is_of_a_kind_stays_with_one_thread():
    """As long as there is other work for the other one."""
    with turns() as both:
        a, b = Held(), Held()
        of_a = [both.submit("a", a), both.submit("a", threading.get_ident)]
        of_b = [both.submit("b", b), both.submit("b", threading.get_ident)]
        assert not a.begun.wait(0.1)  # Until all is known.
        both.start()
        assert a.begun.wait(SECONDS) and b.begun.wait(SECONDS)
        b.free.set()
        (of_b_alone,) = {x.result(SECONDS) for x in of_b}
        # It has nothing else to do.
        assert of_a[1].result(SECONDS) == of_b_alone
        a.free.set()
        assert of_a[0].result(SECONDS) != of_b_alone


def test_what_is_of_no_threads_kind_comes_first():
    with turns() as both:
        a = Held()
        order = []
        of_a = [both.submit("a", a), both.submit("a", lambda: order.append("a"))]
        of_others = [
            both.submit(kind, functools.partial(order.append, kind)) for kind in "bc"
        ]
        both.start()
        concurrent.futures.wait([of_a[1], *of_others], SECONDS)
        assert order == ["b", "c", "a"]
        a.free.set()


def test_what_comes_later_is_done_by_whoever_is_free():
    with turns() as both:
        for _ in range(3):  # Whoever did the first is at work no more.
            before = both.submit("a", threading.get_ident)
            both.start()
            before.result(SECONDS)
        held = Held()
        busy = both.submit("b", held)
        both.start()
        assert held.begun.wait(SECONDS)
        late = both.submit("c", threading.get_ident)
        both.start()
        assert late.result(SECONDS)
        held.free.set()
        busy.result(SECONDS)


def test_what_is_raised_is_raised_where_the_result_is_read():
    def fails():
        raise ValueError("no rows")

    with turns(1) as one:
        failing, after = one.submit("a", fails), one.submit("a", threading.get_ident)
        one.start()
        with pytest.raises(ValueError, match="no rows"):
            failing.result(SECONDS)
        assert after.result(SECONDS)


def test_what_waits_is_cancelled_in_the_end():
    one, held = Turns(1), Held()
    busy, waits = one.submit("a", held), one.submit("a", held)
    one.start()
    assert held.begun.wait(SECONDS)
    one.shutdown(wait=False)
    with pytest.raises(concurrent.futures.CancelledError):
        waits.result(SECONDS)
    held.free.set()
    busy.result(SECONDS)
