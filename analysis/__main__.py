"""Command line: `python -m analysis list`, or an experiment's name and its options.

Tables go to stderr and to files, one line of JSON to stdout. Without --out most write
to results/ in the current folder, over files of the same name. Exit codes: 0 done; 1
the experiment failed or a promise did not hold; 2 unusable command; 130 Ctrl-C.
"""

import json
import os
import shlex
import sys
from collections.abc import Sequence

from analysis import ExperimentError
from analysis.weights import fast_sort
from train.config import UsageError
from train.gpu import prefer_cpu_without_driver


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    prefer_cpu_without_driver()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] in (["weights"], ["weights-speed"]):
        fast_sort()
    # These import jax.
    from analysis.experiments import EXPERIMENTS
    from attn_jax.command import Parser, interrupted

    parser = Parser(prog="python -m analysis", description=__doc__)
    commands = parser.add_subparsers(metavar="EXPERIMENT", required=True, dest="name")
    commands.add_parser("list", help="the experiments, one a line")
    for name, experiment in EXPERIMENTS.items():
        command = commands.add_parser(
            name, help=experiment.SUMMARY, description=experiment.SUMMARY
        )
        experiment.add_arguments(command)
    options = parser.parse_args(arguments)
    if options.name == "list":
        lines = (f"{name}: {of.SUMMARY}" for name, of in EXPERIMENTS.items())
        try:
            print(*lines, sep="\n", flush=True)
        except BrokenPipeError:
            # Nobody reads on (`| head`); Python would flush once more.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    try:
        command = shlex.join(["python", "-m", "analysis", *arguments])
        result = EXPERIMENTS[options.name].run(options, command)
    except UsageError as error:
        print(f"{parser.prog} {options.name}: {error}", file=sys.stderr)
        return 2
    except ExperimentError as error:
        print(f"{parser.prog} {options.name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        # Experiments that keep no rows have nothing to make afresh.
        said = interrupted(options) if hasattr(options, "fresh") else "interrupted"
        print(f"{parser.prog} {options.name}: {said}", file=sys.stderr)
        return 130
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    status = main()
    if status == 130:
        from attn_jax.command import leave

        leave(status)
    sys.exit(status)
