"""What a function of somebody's raised, and how it is said."""

import contextlib
from collections.abc import Iterator

from attn_jax.audit.interrupt import is_ours

# How Python says that a function has not, or wants, an argument.
_ARGUMENTS = "unexpected keyword argument", "required positional argument"
_ARGUMENTS += "required keyword-only argument", "positional arguments but"
# Characters of an exception's line that are repeated.
_MOST_SAID = 500


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
    return str(error) if ours else in_one_line(error)


def in_one_line(error: BaseException) -> str:
    """An exception in one line: its first, or the last one of a traceback in it."""
    name = type(error).__name__
    lines = text_of(error).strip().splitlines()
    if not lines:
        return name
    within = "Traceback (most recent call last)" in lines[0]
    line = lines[-1].strip() if within else lines[0]
    if line.endswith(":") and len(lines) > 1 and not within:
        line += f" {' '.join(x.strip() for x in lines[1:] if x.strip())}"
    return f"{name}: {line if len(line) <= _MOST_SAID else line[:_MOST_SAID] + '...'}"


def text_of(error: BaseException) -> str:
    """`str(error)`, which an error of somebody's may have no way to make."""
    try:
        return str(error)
    except Exception:  # Whatever it is, the error's type is said all the same.
        return ""


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
