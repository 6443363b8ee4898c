"""What a result depends on beside the program: installed versions, the GPU's driver."""

import importlib.metadata
import subprocess
from collections.abc import Iterable


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Those of the packages that are installed, by name."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def driver() -> str | None:
    """The NVIDIA driver's version; None where nvidia-smi does not tell."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return next(iter(found.stdout.splitlines()), "").strip() or None
