"""The order of batches: a function of (seed, step) alone."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from train.data.loader import batches, permute, sample_indices
from train.data.shapes import Shapes
from train.data.source import DataError
from train.data.tokenizer import ByteTokenizer, WordTokenizer


class Numbers:
    """A finite source whose images say which sample they are."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index, /):
        image = np.full((2, 2, 3), index, np.uint8)
        example = {"image": image, "caption": f"number {index}"}
        if index % 10 == 3:
            example["skipped"] = {f"sample {index}": "torn"}
        return example


LARGE = {"batch_size": 128, "seed": 1}


def take(count, source=None, tokenizer=None, **settings):
    settings = {"batch_size": 8, "seed": 1} | settings
    reader = batches(
        Shapes(16, "all", "train", 0) if source is None else source,
        tokenizer or WordTokenizer(12),
        **settings,
    )
    try:
        return [next(reader) for _ in range(count)]
    finally:
        reader.close()


def assert_same(a, b):
    np.testing.assert_array_equal(a["image"], b["image"])
    np.testing.assert_array_equal(a["tokens"], b["tokens"])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 17, 64, 1000])
def test_permute_is_a_permutation_that_depends_on_the_key(size):
    position = np.arange(size, dtype=np.uint64)
    orders = [
        permute(position, size, np.full(size, key, np.uint64)).tolist()
        for key in range(3)
    ]
    for order in orders:
        assert sorted(order) == list(range(size))
    if size >= 17:
        assert orders[0] != orders[1] != orders[2] != orders[0]


def test_permutation_looks_random():
    # A Feistel network with too few rounds keeps neighbours together. Kendall-like
    # checks: the correlation of 1000 positions with their images and of neighbours
    # has standard deviation 1/sqrt(1000) = 0.032 under chance; five of them.
    size = 1000
    position = np.arange(size, dtype=np.uint64)
    for key in range(5):
        order = permute(position, size, np.full(size, key, np.uint64)).astype(float)
        assert abs(np.corrcoef(position.astype(float), order)[0, 1]) < 0.16
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.16


def test_order_is_pinned():
    # A change here changes every training run and breaks every resumed one.
    assert sample_indices(1000, 0, 5, 4, range(4)) == [499, 793, 478, 213]
    assert sample_indices(2**31 - 1, 7, 10**6, 256, range(254, 256)) == [
        1888418420,
        136160645,
    ]


@pytest.mark.parametrize(("size", "batch_size"), [(20, 8), (7, 8), (64, 16)])
def test_an_epoch_shows_every_sample_once(size, batch_size):
    steps = 3 * size // batch_size + 1
    rows = np.concatenate(
        [
            batch["image"][:, 0, 0, 0]
            for batch in take(
                steps,
                Numbers(size),
                ByteTokenizer(12),
                batch_size=batch_size,
            )
        ]
    )
    epochs = [rows[k * size : (k + 1) * size].tolist() for k in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(size))
    assert epochs[0] != epochs[1] != epochs[2]


def test_another_seed_is_another_order():
    first, second = (take(1, seed=seed)[0] for seed in (1, 2))
    assert not np.array_equal(first["tokens"], second["tokens"])


@pytest.mark.parametrize("process_count", [2, 4])
def test_processes_share_out_the_same_global_batches(process_count):
    whole = take(3)
    parts = [
        take(3, process_index=index, process_count=process_count)
        for index in range(process_count)
    ]
    for step in range(3):
        joined = {
            name: np.concatenate([part[step][name] for part in parts])
            for name in ("image", "tokens")
        }
        assert_same(whole[step], joined)


def test_resuming_continues_the_run():
    whole = take(7)
    for batch, resumed in zip(whole[4:], take(3, start_step=4), strict=True):
        assert_same(batch, resumed)


def test_worker_processes_change_nothing():
    for batch, other in zip(take(5), take(5, worker_count=2), strict=True):
        assert_same(batch, other)


def test_the_iterator_knows_its_position_and_what_went_wrong():
    # Twelve bytes hold "number 3" but eight cut "number 10" and above.
    reader = batches(Numbers(20), ByteTokenizer(8), batch_size=10, seed=0, start_step=4)
    assert reader.step == 4 and reader.skipped == {} and reader.truncated == 0
    next(reader)
    next(reader)  # steps 4 and 5 are one epoch
    assert reader.step == 6
    assert reader.skipped == {"sample 3": "torn", "sample 13": "torn"}
    assert reader.truncated == 10
    reader.close()


def test_counts_survive_worker_processes():
    reader = batches(
        Numbers(20), ByteTokenizer(8), batch_size=10, seed=0, worker_count=1
    )
    next(reader)
    next(reader)
    assert len(reader.skipped) == 2 and reader.truncated == 10
    reader.close()


def test_closing_does_not_wait_for_batches_that_nobody_will_take():
    # Larger than what a pipe holds, and all that may be read ahead is under way.
    reader = batches(
        Shapes(64, "all", "train", 0), WordTokenizer(12), **LARGE, worker_count=2
    )
    for _ in range(3):
        next(reader)
    began = time.monotonic()
    reader.close()
    # A batch takes 0.05 s; a reader that waits to be read waits for ever.
    assert time.monotonic() - began < 10


class Torn(Exception):
    """Cannot be sent from process to process as it is."""

    def __init__(self, name, byte):
        super().__init__(f"{name} is torn at byte {byte}")


class Damaged(Numbers):
    def __getitem__(self, index, /):
        raise Torn(f"sample {index}", 7)


def test_any_error_in_a_process_reaches_the_caller():
    with pytest.raises(RuntimeError, match="Torn: sample .* is torn at byte 7"):
        take(1, Damaged(20), worker_count=1)


class Stuck(Numbers):
    """Never gives its last sample."""

    def __getitem__(self, index, /):
        if index == self.size - 1:
            time.sleep(1000)
        return super().__getitem__(index)


def test_closing_does_not_wait_for_a_batch_that_is_being_read():
    settings = {"batch_size": 1, "seed": 0}
    step = [
        sample_indices(20, **settings, step=step, rows=range(1)) for step in range(20)
    ].index([19])
    reader = batches(Stuck(20), ByteTokenizer(8), **settings, worker_count=1)
    for _ in range(step):
        next(reader)
    began = time.monotonic()
    reader.close()
    assert time.monotonic() - began < 10


def test_a_killed_reader_is_named():
    others = set(multiprocessing.active_children())
    reader = batches(
        Shapes(64, "all", "train", 0), WordTokenizer(12), **LARGE, worker_count=1
    )
    next(reader)
    (process,) = set(multiprocessing.active_children()) - others
    process.kill()
    with pytest.raises(DataError, match="was killed"):
        for _ in range(100):
            next(reader)
    reader.close()


def test_images_are_bytes_and_tokens_are_padded():
    batch = take(1)[0]
    assert batch["image"].shape == (8, 16, 16, 3) and batch["image"].dtype == np.uint8
    assert batch["tokens"].shape == (8, 12) and batch["tokens"].dtype == np.int32


def test_impossible_requests_raise_one_line():
    for settings, message in [
        ({"batch_size": 6, "process_count": 4}, "6 does not divide over 4"),
        ({"batch_size": 0}, "positive multiple"),
        ({"seed": -1}, "negative"),
        ({"start_step": -1}, "negative"),
    ]:
        with pytest.raises(ValueError, match=message):
            take(1, **settings)
    with pytest.raises(DataError, match="no samples"):
        take(1, Numbers(0))
    # An error inside a reading thread or process reaches the caller.
    for workers in (0, 1):
        with pytest.raises(ValueError, match="'number'"):
            take(1, Numbers(5), worker_count=workers)


# Holds batches to the end, as JAX may, and leaves by any exception as a trainer does.
_READING = """
import contextlib, signal, sys
from train.data.loader import batches
from train.data.shapes import Shapes
from train.data.tokenizer import WordTokenizer
if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    # Shells start background jobs with Ctrl-C ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tokenizer = WordTokenizer(12)
    source = Shapes(16, "all", "train", 0)
    reader = batches(source, tokenizer, batch_size=8, seed=1, worker_count=2)
    with contextlib.closing(reader):
        sys.held = [next(reader) for _ in range(6)]
        print("reading", flush=True)
        while True:
            next(reader)
"""


@pytest.fixture
def reading(tmp_path):
    """A process that reads batches with two workers, leading its own group."""
    program = tmp_path / "reading.py"
    program.write_text(_READING)
    process = subprocess.Popen(
        [sys.executable, str(program)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "reading\n", process.communicate()
    yield process
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, -signal.SIGINT)]
)
def test_a_signal_to_the_group_leaves_nothing_behind(reading, number, code):
    os.killpg(reading.pid, number)
    _, err = reading.communicate(timeout=60)
    assert reading.returncode == code, err
    assert "leaked" not in err and "Process" not in err


def test_readers_end_with_a_killed_trainer(reading):
    os.kill(reading.pid, signal.SIGKILL)
    reading.wait(timeout=60)
    deadline = time.monotonic() + 30
    while True:
        try:
            os.killpg(reading.pid, 0)
        except ProcessLookupError:
            break  # Nobody of the group is left.
        assert time.monotonic() < deadline
        time.sleep(0.05)
