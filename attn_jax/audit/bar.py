"""How far an audit is: a bar with `rich` if that is installed, else a line of text."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from attn_jax.audit.parts import Progress


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[Progress], None]]:
    """What `audit_attention` may tell; it is drawn on standard error, in place, and
    only if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda progress: None
        return
    try:
        from rich import console, progress
    except ImportError:
        try:
            yield _draw_line
        finally:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
        return
    columns = (
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.description}"),
    )
    on = console.Console(stderr=True)
    with progress.Progress(*columns, console=on, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda now: bar.update(
            task, description=now.part, completed=now.done, total=now.known
        )


def say(line: str) -> None:
    """One line on standard error, over a line that is drawn there."""
    over = "\r\x1b[2K" if sys.stderr.isatty() else ""
    print(f"{over}{line}", file=sys.stderr, flush=True)


def _draw_line(progress: Progress) -> None:
    line = f"{progress.done} of {progress.known}: {progress.part}"
    print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)
