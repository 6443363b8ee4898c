"""`python -m attn_jax.audit TARGET`: see `--help`."""

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from attn_jax.audit import attribution
from attn_jax.audit.bar import progress_bar
from attn_jax.audit.inputs import FAMILIES, Shape
from attn_jax.audit.interrupt import Interrupted, interruptible, leave
from attn_jax.audit.measure import is_out_of_memory
from attn_jax.audit.parts import Progress
from attn_jax.audit.problem import DTYPES, MASKS
from attn_jax.audit.raised import in_one_line, printable
from attn_jax.audit.report import Report
from attn_jax.audit.run import audit_attention
from attn_jax.audit.table import print_report
from attn_jax.audit.target import Adapter, Target, TargetError, resolve
from attn_jax.audit.workers import NotStartedError
from attn_jax.canaries import CanaryError
from attn_jax.command import Parser
from attn_jax.machine import prefer_cpu_without_driver
from attn_jax.recipe import RECIPES, Recipe
from attn_jax.store import StoreError

DESCRIPTION = """\
Says how far an attention function is from exact, forward and backward, why, and whether
that is a fault. TARGET is xla, cudnn, pallas, emulated, reference, attention_mgpu,
emulated:RECIPE, tokamax:IMPLEMENTATION, context_parallel:STRATEGY or
package.module:function, whose signature is jax.nn.dot_product_attention's; the options
of the second group describe another one.
Ends with 0 if the function is trustworthy, with 4 if it is not, with 2 if the command
cannot be carried out, and with 130 if it is interrupted."""


# Of an input, which is held in FP64, too: 32 GiB.
_MOST_NUMBERS = 2**32


def shape(text: str) -> Shape:
    """B,T,S,N,K,H."""
    numbers = text.split(",")
    if len(numbers) != 6 or not all(x.isdecimal() and int(x) > 0 for x in numbers):
        raise argparse.ArgumentTypeError(
            f"a shape is six numbers B,T,S,N,K,H such as 2,256,256,4,2,64, not {text!r}"
        )
    try:
        found = Shape(*map(int, numbers))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    largest = max(math.prod(found.query), math.prod(found.key))
    if largest > _MOST_NUMBERS:
        raise argparse.ArgumentTypeError(
            f"{text} has an array of {largest:.3g} numbers; {_MOST_NUMBERS} are tried "
            "at most"
        )
    return found


def _folder_name(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the name of a folder is wanted, not ''")
    return Path(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a number from 0 is wanted, not {text!r}")
    return int(text)


def _pair(text: str, hint: str = "") -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        wanted = "a name, '=' and what stands for it are wanted"
        raise argparse.ArgumentTypeError(f"{wanted}{hint}, not {text!r}")
    return name, value


def _argument(text: str) -> tuple[str, object]:
    name, value = _pair(text, " (an empty text is '\"\"')")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = Parser(prog="python -m attn_jax.audit", description=DESCRIPTION)
    add = made.add_argument
    add("target", metavar="TARGET")
    add(
        *("--shapes",),
        nargs="+",
        action="extend",
        type=shape,
        metavar="B,T,S,N,K,H",
        help="batch, queries, keys, query heads, key heads, head dim, such as "
        "2,256,256,4,2,64; the first is measured under all masks; some chosen for the "
        "device, if not given",
    )
    add(
        *("--dtype",),
        choices=DTYPES,
        default="bfloat16",
        help="of query, key, value and their gradients (%(default)s)",
    )
    add(
        "--families",
        nargs="+",
        action="extend",
        choices=FAMILIES,
        metavar="FAMILY",
        help=_among(FAMILIES),
    )
    add(
        *("--masks",),
        nargs="+",
        action="extend",
        choices=MASKS,
        metavar="MASK",
        help=_among(MASKS),
    )
    add(
        "--no-gradients",
        action="store_true",
        help="the forward pass alone, and probes, invariances and merges of it; not "
        "looked at are sums of dS and dV, and the gradient through LSE",
    )
    add(
        *("--against",),
        nargs="+",
        action="extend",
        choices=RECIPES,
        metavar="RECIPE",
        help="recipes to look among for one that rounds alike; all, if not given",
    )
    add(
        "--out",
        type=_folder_name,
        help="folder of the report (runs/audit/TARGET, with --argument and --shards)",
    )
    add("--fresh", action="store_true", help="measure anew what is in the folder")
    add(
        *("--processes",),
        type=_count,
        metavar="N",
        help="that the target runs in; 1 keeps the command alive where the target "
        "aborts its process; 0: in this one; if not given, 0 without a GPU, else as "
        "memory and cores allow",
    )
    group = made.add_argument_group("a function of another signature")
    add = group.add_argument
    add(
        *("--layout",),
        choices=("BTNH", "BNTH"),
        default="BTNH",
        help="of query, key, value, out: positions or heads first (%(default)s)",
    )
    add("--packed", action="store_true", help="one array [B, T, 3, N, H]")
    add(
        *("--scale",),
        choices=("keyword", "positional", "none", "outside"),
        default="keyword",
        help="positional: after value; none: it knows; outside: it does not scale",
    )
    add(
        *("--lse",),
        default="return_residual",
        metavar="NAME",
        help="argument to have LSE, too; always: it comes in any case; never",
    )
    add(
        *("--lse-layout",),
        choices=("BTN", "BNT"),
        default="BTN",
        help="axes of LSE: batch, queries, heads in which order (%(default)s)",
    )
    add(
        *("--lse-base",),
        choices=("e", "2"),
        default="e",
        help="of the logarithm that LSE is (%(default)s)",
    )
    add(
        *("--rename",),
        nargs="+",
        action="extend",
        type=_pair,
        default=[],
        metavar="NAME=THEIRS",
        help="such as is_causal=causal",
    )
    add(
        *("--argument",),
        nargs="+",
        action="extend",
        type=_argument,
        default=[],
        metavar="NAME=VALUE",
        help="given to every call; JSON, or a text",
    )
    add(
        *("--shards",),
        type=_devices,
        default=1,
        metavar="N",
        help="devices that it cuts the sequence between: it may refuse lengths that "
        "they do not divide, and rings of so many are among the recipes; "
        "context_parallel takes so many, all if not given",
    )
    return made


def _once[T](
    made: argparse.ArgumentParser, option: str, pairs: Sequence[tuple[str, T]]
) -> dict[str, T]:
    """By name, each of which may be given once."""
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            made.error(f"{option} {name} is given more than once")
    return dict(pairs)


def _devices(text: str) -> int:
    if not text.isdecimal() or text == "0":
        raise argparse.ArgumentTypeError(f"a number from 1 is wanted, not {text!r}")
    return int(text)


def _folder(options: argparse.Namespace) -> Path:
    """Of what is audited: with other arguments it is another function."""
    named = [options.target, *(f"{k}={v}" for k, v in options.argument)]
    if options.shards > 1:
        named.append(f"shards={options.shards}")
    return Path("runs", "audit", re.sub(r"[^\w.-]+", "-", " ".join(named)))


def _against(names: Sequence[str] | None, shards: int) -> list[Recipe] | None:
    """Rings are of as many devices as the target's, where that is known."""
    if names is None:
        return None
    found = [RECIPES[name] for name in names]
    return [
        attribution.of_size(x, shards) if x.ring_size > 1 and shards > 1 else x
        for x in found
    ]


def _among(names) -> str:
    return f"some of {', '.join(names)}"


def _report(
    options: argparse.Namespace,
    target: Target,
    folder: Path,
    tell: Callable[[Progress], None],
) -> Report:
    """The audit that the options ask for."""
    return audit_attention(
        target,
        shapes=options.shapes,
        dtype=options.dtype,
        families=options.families,
        masks=options.masks,
        gradients=not options.no_gradients,
        against=_against(options.against, target.adapter.shards),
        folder=folder,
        fresh=options.fresh,
        processes=options.processes,
        tell=tell,
    )


def _hint(reason: str, adapter: Adapter) -> str:
    """What to say where cuDNN is missing, or to a function that passes on whatever it
    is given to one that has no argument for LSE, or for the scale, or that the user
    gives, which no signature told."""
    without = {adapter.lse: "--lse never"}
    if adapter.scale == "keyword":
        scale = adapter.renamed.get("scale", "scale")
        without[scale] = "--scale none, if it scales by itself"
    without |= dict.fromkeys(adapter.more, "leave out --argument")
    if "cuDNN not found" in reason:
        return " (it needs an NVIDIA GPU)"
    if "positional arguments but" in reason:
        return " (it is called with query, key and value, or with --packed as one)"
    for name, option in without.items():
        if f"unexpected keyword argument {name!r}" in reason:
            return f" (without {name}: {option})"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    made = parser()
    options = made.parse_args(arguments)
    prefer_cpu_without_driver()
    adapter = Adapter(
        layout=options.layout,
        packed=options.packed,
        scale=options.scale,
        lse=None if options.lse == "never" else options.lse,
        lse_layout=options.lse_layout,
        lse_base=options.lse_base,
        renamed=_once(made, "--rename", options.rename),
        more=_once(made, "--argument", options.argument),
        shards=options.shards,
    )
    folder = options.out or _folder(options)
    parts = (folder / "parts.jsonl").absolute()  # Wherever the target goes.
    # Several processes share a GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    said = f"interrupted; what is done is kept in {folder}, for the same command"
    interrupted = f"{made.prog}: {said}\n"
    try:
        if folder.exists() and not folder.is_dir():
            raise StoreError(f"--out {folder} is a file, and a folder is needed")
        # Modules may ask for the main thread when they are imported.
        target = resolve(options.target, adapter)
        with progress_bar() as tell:
            report = interruptible(lambda: _report(options, target, folder, tell))
    except (TargetError, StoreError, CanaryError, NotStartedError, OSError) as error:
        made.exit(2, f"{made.prog}: {printable(error)}\n")
    except (RuntimeError, MemoryError) as error:
        if "initialize backend" in str(error):
            made.exit(2, f"{made.prog}: {in_one_line(error)}\n")
        # What the target asks for is a row of the report; this is what we compare with.
        if not (isinstance(error, MemoryError) or is_out_of_memory(error)):
            raise
        said = "no memory is left for exact results: are the shapes too large, or does "
        said += "another program hold it? "
        said += f"What is done is kept in {folder}, for the same command"
        made.exit(2, f"{made.prog}: {said}\n")
    except KeyboardInterrupt:
        made.exit(130, interrupted)
    except Interrupted:
        print(end=interrupted, file=sys.stderr)
        leave(130)
    if all(cell.status != "measured" for cell in report.cells):
        # What is missing here may be there for the next call.
        parts.unlink(missing_ok=True)
        reason = next(cell.reason for cell in report.cells)
        said = f"{report.target} does not run under jax.jit here: {reason}"
        said += _hint(reason, adapter)
        made.exit(2, f"{made.prog}: {printable(said)}\n")
    try:
        print_report(report, sys.stdout)
        print(f"{folder / 'report.html'}", flush=True)
    except (BrokenPipeError, SystemExit):  # The latter is how rich puts it.
        # Nobody reads on, and the files are there; Python would flush once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return report.exit_code
