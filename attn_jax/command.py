"""What the library's commands share."""

import argparse


class Parser(argparse.ArgumentParser):
    """Complains in one line."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")
