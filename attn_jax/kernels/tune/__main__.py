"""Measures tilings of the kernels on the GPU at hand and writes the table of them.

Every tiling that registers and shared memory allow, and every plan of the fused kernel,
is compiled, checked against FP64 (errors in units, the same bits in all runs, with and
without a mask, lengths that no block divides), and then timed in turn with the table's
own. What does not compile, spills, is wrong or hangs is kept with its reason. The same
command goes on where it was ended.

OUT/trials.jsonl has a line for every finished candidate, OUT/winners.md the fastest
beside the present entries, OUT/tilings.json the whole table with the winners in it, in
the form of attn_jax/kernels/tilings.json: copied there it is what the kernels use.
Exit codes: 0 done; 2 unusable command; 3 out of time, run it again to go on; 130
Ctrl-C, likewise.
"""

import argparse
import contextlib
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from attn_jax.command import Parser, interrupted
from attn_jax.kernels import card, tuning
from attn_jax.kernels.architecture import H100_MULTIPROCESSORS
from attn_jax.kernels.tune import trial
from attn_jax.kernels.tune.candidates import (
    KERNELS,
    candidates,
    groups,
    head_dims,
    reason_against,
)
from attn_jax.kernels.tune.search import Search, named, settings_of
from attn_jax.kernels.tune.trial import Candidate
from attn_jax.kernels.tune.winners import as_markdown, new_table
from attn_jax.kernels.tuning import Group
from attn_jax.kernels.worker import Worker, WorkerFailed
from attn_jax.recipe import Architecture
from attn_jax.store import Store, StoreError

# A candidate that takes longer to compile does not end.
_SECONDS_TO_COMPILE = 180


class _Unusable(Exception):
    """A command that cannot run, in one line that says what would work."""


def _dims(text: str) -> tuple[int, int]:
    """64, or 192x128: of Q and K, and of V."""
    head_dim, _, value_dim = text.partition("x")
    try:
        return int(head_dim), int(value_dim or head_dim)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no head dim such as 64, nor a pair such as 192x128"
        ) from None


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    found = Parser(
        prog="python -m attn_jax.kernels.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("--out", type=Path, default=Path("runs", "tuning"), help="folder")
    add("--fresh", action="store_true", help="forget what is in the folder")
    add("--kernels", nargs="+", choices=tuning.KERNEL_NAMES, help="default: all")
    add(
        *("--head-dims",),
        nargs="+",
        type=_dims,
        metavar="H",
        help="64, or 192x128 for V's own; default: all that have an entry",
    )
    add("--seconds", type=float, default=1.0, help="of timing a problem (default 1)")
    add("--minutes", type=float, help="begin no candidate after so many")
    add(
        "--architecture",
        choices=tuple(KERNELS),
        help="whose kernels; default: the card's. Ampere's run on a Hopper GPU, as a "
        "trial that writes no table",
    )
    add(
        "--dry-run",
        action="store_true",
        help="no GPU: compile the candidates and show registers, spills and shared "
        "memory (needs the extra `compile`; without it they are listed)",
    )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    command = parser()
    options = command.parse_args(arguments)
    try:
        return _dry_run(options) if options.dry_run else _tune(options)
    except (_Unusable, StoreError, card.NoCard) as error:
        more = ""
        if isinstance(error, card.NoCard):
            more = "; --dry-run compiles the candidates without a GPU"
        print(f"{command.prog}: {error}{more}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        said = "interrupted" if options.dry_run else interrupted(options)
        print(f"{command.prog}: {said}", file=sys.stderr)
        return 130


def _groups(
    options: argparse.Namespace,
    architecture: Architecture,
    multiprocessors: int | None = None,
) -> list[Group]:
    """Raises _Unusable for a head dim that these kernels do not have."""
    known = list(head_dims(architecture))
    one_by_one = tuning.HEAD_DIMS[architecture]
    for dims in options.head_dims or known:
        mixed = architecture == "hopper" and set(dims) <= set(one_by_one)
        if not (dims in known or mixed):
            raise _Unusable(
                f"{architecture.capitalize()}'s kernels have no head dim "
                f"{'x'.join(map(str, dict.fromkeys(dims)))}; they have "
                f"{', '.join(map(str, one_by_one))}"
            )
    names = options.kernels or tuning.KERNEL_NAMES
    wanted = options.head_dims or known
    found = [
        group
        for name in names
        for group in groups(architecture, name, wanted, multiprocessors)
    ]
    if not found:
        card_of = ""
        if architecture == "hopper":
            card_of = f"a card with {H100_MULTIPROCESSORS} multiprocessors and "
        raise _Unusable(
            f"{architecture.capitalize()}'s {', '.join(names)} is for {card_of}"
            f"head dims {', '.join(map(str, tuning.FUSED_HEAD_DIMS))}"
        )
    return found


def _tune(options: argparse.Namespace) -> int:
    if not 0 < options.seconds < float("inf"):
        raise _Unusable(f"--seconds must be above 0, got {options.seconds:g}")
    deadline = float("inf")
    if options.minutes is not None:
        if not options.minutes > 0:
            raise _Unusable(f"--minutes must be above 0, got {options.minutes:g}")
        deadline = time.monotonic() + 60 * options.minutes
    with Worker(card.ON_GPU) as worker:
        found = card.find(worker, options.architecture)
        multiprocessors = found.described["multiprocessors"]
        wanted = _groups(options, found.architecture, multiprocessors)
        path = options.out / "trials.jsonl"
        settings = settings_of(options.seconds)
        with contextlib.closing(Store(path, settings, fresh=options.fresh)) as store:
            store.describe(found.described)
            search = Search(store, worker, seconds=options.seconds, deadline=deadline)
            decisions, complete = search.run(wanted)
    table = as_markdown(decisions)
    print(table, file=sys.stderr)
    where = f"{found.device}, driver {found.described['driver']}, jax {jax.__version__}"
    files = {"winners.md": f"{where}\n\n{table}"}
    if found.native:
        files["tilings.json"] = tuning.write(new_table(tuning.ENTRIES, decisions))
    else:
        print(
            f"no tilings.json: {found.device} is no GPU of {found.architecture}",
            file=sys.stderr,
        )
    for name, text in files.items():
        (options.out / name).write_text(text)
    said = {
        "decided": sum(d.verdict != "unfinished" for d in decisions),
        "unfinished": sum(d.verdict == "unfinished" for d in decisions),
        "winners": sum(d.verdict == "wins" for d in decisions),
        "files": [str(path), *(str(options.out / name) for name in files)],
    }
    print(json.dumps(said))
    return 0 if complete else 3


def _dry_run(options: argparse.Namespace) -> int:
    architecture = options.architecture or "hopper"
    with Worker(card.WITHOUT_GPU) as worker:
        wanted = _groups(options, architecture)
        compiler = importlib.util.find_spec("jax_cuda13_plugin") is not None
        if not compiler:
            print("listed, not compiled: install the extra `compile`", file=sys.stderr)
        for group in wanted:
            for tiling in candidates(group):
                candidate = Candidate(group, tiling)
                against = reason_against(group, tiling)
                if against is None and compiler:
                    said = _compiled(worker, candidate)
                else:
                    said = f"refused: {against}" if against else "to be compiled"
                print(f"{named(candidate)}: {said}", flush=True)
    return 0


def _compiled(worker: Worker, candidate: Candidate) -> str:
    try:
        row = worker.call(trial.compile_only, candidate, seconds=_SECONDS_TO_COMPILE)
    except WorkerFailed as error:
        return f"refused: {str(error).splitlines()[0]}"
    said = f"refused: {row['refused']}" if row["refused"] else "compiles"
    names = ("registers", "spilled_bytes", "shared_memory")
    figures = (f"{name} {row[name]}" for name in names if row.get(name) is not None)
    return ", ".join([said, *figures])


if __name__ == "__main__":
    sys.exit(main())
