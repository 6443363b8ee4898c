"""Where a run started: the first weights of `python -m train`, drawn once more."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from analysis.weights.leaves import leaves
from analysis.weights.readers import Tree, subtree
from train.config import UsageError, load
from train.data import make_tokenizer
from train.precision import make_policy
from train.record import environment
from train.state import init_state, make_parts


def run_folder(path: Path) -> Path | None:
    """The run folder that a path is, or whose checkpoint it is."""
    for folder in (path, *path.resolve().parents[1:2]):
        if (folder / "config.json").is_file() and (folder / "checkpoints").is_dir():
            return folder
    return None


def drawn(path: Path, tree: str | None) -> tuple[Tree, list[str]]:
    """The weights of step 0 by the seed of a run's config.json, and what to mind.

    Training keeps no checkpoint of step 0. They are the same to the bit where program,
    versions and device are; a line says where these are known to be others.

    Raises:
      UsageError: the path is of no run of ours, or it started from another's weights.
    """
    folder = run_folder(path)
    if folder is None:
        raise UsageError(
            f"--initial seed: {path} is no run of python -m train: give the path of "
            "the checkpoint that it started from"
        )
    config = load(folder / "config.json")
    if config.init_from is not None:
        raise UsageError(
            f"--initial seed: {folder} started from {config.init_from} (--init-from): "
            f"give --initial and the checkpoint of it that it took"
        )
    tokenizer = make_tokenizer(config.model.tokenizer, config.model.text_length)
    parts = make_parts(config, make_policy(config), tokenizer.vocab_size)
    state = jax.jit(lambda seed: init_state(parts, optax.identity(), seed))(
        jnp.uint32(config.seed)
    )
    minded = [
        f"{folder}: it trained with {name} {there}, its start is drawn with {here}"
        for name, there, here in _other_versions(folder)
    ]
    return subtree(folder, leaves(state._asdict()), tree), minded


def _other_versions(folder: Path) -> list[tuple[str, object, object]]:
    """What may have drawn other numbers in the run than it does here."""
    try:
        there = json.loads((folder / "environment.json").read_text())
        versions = dict(there["versions"])
    except (OSError, ValueError, KeyError, TypeError):
        return [("what environment.json does not tell,", "", "this program")]
    here = environment()
    pairs = [
        ("commit", there.get("git_commit"), here["git_commit"]),
        ("device", there.get("device"), here["device"]),
        *((name, versions.get(name), here["versions"].get(name)) for name in _DRAWN_BY),
    ]
    return [pair for pair in pairs if pair[1] != pair[2]]


_DRAWN_BY = ("jax", "jaxlib", "flax")
