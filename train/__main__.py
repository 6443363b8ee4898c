"""Command line: parse, run, turn the outcome into an exit code.

Exit codes: 0 done; 1 error; 2 unusable command; 3 the loss is no longer finite;
75 stopped by SIGTERM after a checkpoint, run the same command again; 130 Ctrl-C.
"""

import contextlib
import dataclasses
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.config import Config, SampleConfig, UsageError, load, to_json
from train.gpu import prefer_cpu_without_driver, set_profile
from train.presets import PRESETS
from train.validate import validate


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    prefer_cpu_without_driver()
    try:
        if arguments[:1] == ["sample"]:
            command = _parse(SampleConfig, arguments[1:], prog="python -m train sample")
            from train.sample import sample_run

            print(sample_run(command))
            return 0
        config = parse_config(arguments)
        validate(config)
        if config.print_config:
            print(to_json(dataclasses.replace(config, print_config=False)))
            return 0
        set_profile(config.profile)
        return _train(config)
    except UsageError as error:
        print(f"python -m train: {_one_line(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("python -m train: interrupted", file=sys.stderr)
        return 130


def _train(config: Config) -> int:
    from train.loop import Diverged, Interrupted, Preempted, run

    try:
        run(config)
    except Diverged as error:
        print(f"python -m train: {error}", file=sys.stderr)
        return 3
    except Preempted as error:
        print(f"python -m train: {error}", file=sys.stderr)
        return 75
    except Interrupted as error:
        print(f"python -m train: {error}", file=sys.stderr)
        return 130
    return 0


def parse_config(arguments: Sequence[str]) -> Config:
    """The configuration of a command line: a preset or a file, then its changes.

    Raises:
      UsageError: an argument is unknown or has no such value, or there are both a
        preset and a file.
    """
    arguments, file = _take(arguments, "--config")
    _, name = _take(arguments, "--preset")
    if file is not None and name is not None:
        raise UsageError(
            f"--preset={name} and --config={file} both give the starting values of all "
            "options: leave out one of them"
        )
    if file is not None:
        default = load(Path(file))
    else:
        # An unknown name is left to the parser, which lists those there are.
        default = PRESETS.get(name or Config().preset, Config())
    return _parse(Config, arguments, prog="python -m train", default=default)


def _take(arguments: Sequence[str], flag: str) -> tuple[list[str], str | None]:
    """The other arguments, and the flag's last value, the one that counts for the
    parser, too."""
    rest, found, words = [], None, iter(arguments)
    for word in words:
        name, equals, text = word.partition("=")
        value = None
        if name == flag:
            value = text if equals else next(words, None)
        if value is None:  # A flag without its value is the parser's to refuse.
            rest.append(word)
        else:
            found = value
    return rest, found


def _parse(kind: Any, arguments: list[str], *, prog: str, default: Any = None) -> Any:
    import tyro

    defaults = {} if default is None else {"default": default}
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(kind, prog=prog, args=arguments, **defaults)
    except SystemExit as stop:
        if not stop.code:
            raise
    message = _first_message(complaint.getvalue())
    raise UsageError(f"{message} (see {prog} --help)")


def _first_message(box: str) -> str:
    """The message of the parser's framed complaint, without frame and help text."""
    lines = []
    for line in box.splitlines():
        text = line.strip().strip("│").strip()
        if not text or text[0] in "╭╰":
            continue
        if text[0] == "─":
            break
        lines.append(text)
    return " ".join(lines)


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


if __name__ == "__main__":
    status = main()
    if status == 130:
        from attn_jax.command import leave

        leave(status)
    sys.exit(status)
