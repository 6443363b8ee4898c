"""What the library's commands share."""

import argparse


class Parser(argparse.ArgumentParser):
    """Complains in one line."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def interrupted(options: argparse.Namespace, kept: str = "what is done is kept") -> str:
    """What a command that keeps rows, with `--out` and `--fresh`, says of Ctrl-C."""
    where = f" in {options.out}" if options.out else ""
    again = "the same command" + " without --fresh" * options.fresh
    return f"interrupted; {kept}{where}, for {again}"
