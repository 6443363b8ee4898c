"""Argument parser, Ctrl-C text and exit that the command lines share."""

import argparse
import multiprocessing
import os
import sys
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Complains in one line."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def interrupted(options: argparse.Namespace, kept: str = "what is done is kept") -> str:
    """What a command that keeps rows, with `--out` and `--fresh`, says of Ctrl-C."""
    where = f" in {options.out}" if options.out else ""
    again = "the same command" + " without --fresh" * options.fresh
    return f"interrupted; {kept}{where}, for {again}"


def leave(status: int) -> NoReturn:
    """Ends the process and those that it started, whatever its threads do: at Python's
    own end XLA is waited for, and aborts where what it computes with is gone."""
    for child in multiprocessing.active_children():
        child.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
