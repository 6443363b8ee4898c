"""Turns an exception of the audited function into one line of a report."""

import contextlib
import logging
import re
from collections.abc import Iterator

import jax

from attn_jax.audit.interrupt import is_ours

# How Python says that a function has not, or wants, an argument.
_ARGUMENTS = "unexpected keyword argument", "required positional argument"
_ARGUMENTS += "required keyword-only argument", "positional arguments but"
# JAX names the type of what a function with a gradient of its own closes over alone.
_OF_ANOTHER_TRACE = " (it holds an array of another trace: pass it as an argument)"
# Characters of an exception's line that are repeated.
_MOST_SAID = 500
# What a terminal obeys, whole: sequences with parameters, texts for it such as its
# title, and single letters.
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[]PX^_].*?(?:\x07|\x1b\\)|\x1b[ -/]*[0-~]",
    re.DOTALL,
)


class NotTakenError(NotImplementedError):
    """The target has no argument for this problem: no fault of its."""


class WrongResultError(TypeError):
    """The target returned something that is no attention of these arguments."""


def names_an_argument(error: Exception) -> bool:
    """Whether it is Python's TypeError for an argument that a function does not have,
    or has to be given: so does one refuse that passes on whatever it is given."""
    if isinstance(error, WrongResultError) or not isinstance(error, TypeError):
        return False
    return any(x in text_of(error) for x in _ARGUMENTS)


def said(error: Exception) -> str:
    """What a call that raised is reported with: our own errors are sentences."""
    ours = isinstance(error, NotTakenError | WrongResultError)
    return printable(error) if ours else in_one_line(error)


def in_one_line(error: BaseException) -> str:
    """An exception in one line: its first, or the last one of a traceback in it; as
    `printable` gives it."""
    name = printable(type(error).__name__)
    lines = _ESCAPES.sub("", text_of(error)).strip().splitlines()
    if not lines:
        return name
    within = "Traceback (most recent call last)" in lines[0]
    line = lines[-1].strip() if within else lines[0]
    if line.endswith(":") and len(lines) > 1 and not within:
        line += f" {' '.join(x.strip() for x in lines[1:] if x.strip())}"
    line = printable(line)
    if len(line) > _MOST_SAID:
        line = line[:_MOST_SAID] + "..."
    return f"{name}: {line}{_OF_ANOTHER_TRACE if _is_of_another_trace(line) else ''}"


def _is_of_another_trace(line: str) -> bool:
    return "No constant handler for type" in line and "Tracer" in line


def printable(text: object) -> str:
    """A text in one line, without what a terminal obeys or UTF-8 cannot hold."""
    return "".join(
        c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}"
        for c in _ESCAPES.sub("", str(text))
    )


def text_of(error: BaseException) -> str:
    """`str(error)`, which an error of somebody's may have no way to make."""
    try:
        return str(error)
    except Exception:  # Whatever it is, the error's type is said all the same.
        return ""


def numberless(reason: str) -> str:
    """What was raised without its numbers, which are those of a problem: the same is
    said of others."""
    return re.sub(r"\d+", "#", reason)


class _NotOfCallbacks(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and "callback failed" in str(record.msg))


@contextlib.contextmanager
def callbacks_unlogged() -> Iterator[None]:
    """Keeps JAX from logging, with its traceback, what a callback raises: whoever runs
    the program has it raised, too, and says it."""
    # Of the modules that they are in; `io_callback` is in the first one's.
    loggers = [
        logging.getLogger(function.__module__)
        for function in (jax.pure_callback, jax.debug.callback)
    ]
    # One of its own, since audits may overlap.
    own = _NotOfCallbacks()
    for logger in loggers:
        logger.addFilter(own)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(own)


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Makes an ordinary error of what a target raises to end its process, but for an
    interrupt that may be the user's."""
    try:
        yield
    except Exception:  # Already what the others are made.
        raise
    except KeyboardInterrupt:
        if is_ours():
            raise
        raise RuntimeError("it raises KeyboardInterrupt") from None
    except SystemExit as error:
        raise RuntimeError(f"it calls sys.exit({error.code!r})") from error
    except BaseException as error:
        raise RuntimeError(f"it raises {in_one_line(error)}") from error
