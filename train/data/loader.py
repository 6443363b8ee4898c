"""Batches whose order is a pure function of (seed, step), read some steps ahead.

Global row r = step * batch_size + row of the whole run shows sample
permutation(epoch)[r mod n] with epoch = r div n, where n is the size of the source
and every epoch has its own keyed permutation. Nothing is carried from batch to batch,
so a run resumes at any step and every process count trains on the same batches. No
sample is dropped: a batch may end one epoch and begin the next.
"""

import collections
import multiprocessing
import os
import pickle
import queue
import signal
import traceback
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import NamedTuple, TypedDict

import numpy as np
from jaxtyping import Int32, UInt8, UInt64

from train.data.source import BatchSource, DataError, Source
from train.data.tokenizer import Tokenizer

_ROUNDS = 6  # of the Feistel network; 4 is the least that hides the key
# A thread makes a whole batch at a time. Rendering and decoding release the GIL, but
# not all the time, so more than a few threads only take turns.
_THREADS = min(8, os.cpu_count() or 1)
_AHEAD = 8  # batches being read or kept ready, at least


class Batch(TypedDict):
    """What one process sees of a global batch: its contiguous block of rows."""

    image: UInt8[np.ndarray, "b R R 3"]
    tokens: Int32[np.ndarray, "b L"]


class _Read(NamedTuple):
    """A batch with what happened on the way, so that counts survive processes."""

    batch: Batch
    skipped: dict[str, str]
    truncated: int


def _mix(x: UInt64[np.ndarray, " b"]) -> UInt64[np.ndarray, " b"]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014, figure 16)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(
    position: UInt64[np.ndarray, " b"], size: int, key: UInt64[np.ndarray, " b"]
) -> UInt64[np.ndarray, " b"]:
    """A permutation of range(size) for each key, evaluated at single positions.

    A balanced Feistel network over the smallest even number of bits that holds
    `size`; results outside the range are walked on along their cycle until they fall
    inside (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"), at most
    four passes on average. Memory does not depend on `size`.
    """
    half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    result = position.copy()
    pending = np.arange(len(result))
    while pending.size:
        left, right = result[pending] >> half, result[pending] & mask
        for step in range(_ROUNDS):
            salt = _mix(key[pending] + np.uint64(step * 0x9E3779B97F4A7C15 % 2**64))
            left, right = right, left ^ (_mix(right ^ salt) & mask)
        result[pending] = left << half | right
        pending = pending[result[pending] >= np.uint64(size)]
    return result


def sample_indices(
    size: int, seed: int, step: int, batch_size: int, rows: range
) -> list[int]:
    """Which samples the given rows of the global batch at `step` show."""
    position = [step * batch_size + row for row in rows]
    epoch = np.array([p // size for p in position], np.uint64)
    within = np.array([p % size for p in position], np.uint64)
    key = _mix(_mix(np.full(len(rows), seed, np.uint64)) + epoch)
    return permute(within, size, key).tolist()


@dataclass(frozen=True)
class _Batches:
    """This process's rows of the batch of any step."""

    source: Source
    tokenizer: Tokenizer
    batch_size: int
    seed: int
    rows: range

    def read(self, step: int) -> _Read:
        wanted = sample_indices(
            len(self.source), self.seed, step, self.batch_size, self.rows
        )
        if isinstance(self.source, BatchSource):
            examples = self.source.__getitems__(wanted)
        else:
            examples = [self.source[i] for i in wanted]
        captions = [example["caption"] for example in examples]
        skipped: dict[str, str] = {}
        for example in examples:
            skipped |= example.get("skipped", {})
        return _Read(
            batch={
                "image": np.stack([example["image"] for example in examples]),
                "tokens": np.stack([self.tokenizer.encode(c) for c in captions]),
            },
            skipped=skipped,
            truncated=sum(self.tokenizer.overflow(c) > 0 for c in captions),
        )


_FROM_OUTSIDE = (signal.SIGINT, signal.SIGTERM)


class _Process:
    """A process that reads batches, asked and answered through a pipe of its own.

    Ctrl-C and most job schedulers signal the whole process group, and a trainer that
    saves before it ends may want another batch: both signals are blocked here. It
    ends when the trainer closes it, or with the trainer: its pipe ends then. (Pools
    that share a pipe wait for ever when one of them is killed while it answers.)
    """

    def __init__(self, reads: _Batches):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, reads))
        resource_tracker.ensure_running()  # Python 3.12 unblocks signals as it starts.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _FROM_OUTSIDE)
        try:
            self._process.start()  # The process has our mask from its first moment.
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def read(self, step: int) -> _Read:
        try:
            self._connection.send(step)
            answer = self._connection.recv()
        except (EOFError, OSError):
            raise DataError(
                "a process that reads the data was killed, for want of memory most "
                "likely: take fewer of them (--data.workers) or smaller batches"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self) -> None:
        """Who waits for an answer gets none any more."""
        self._process.kill()

    def end(self) -> None:
        self._process.join()
        self._connection.close()


def _serve(connection: Connection, reads: _Batches) -> None:
    while True:
        try:
            step = connection.recv()
        except EOFError:
            return
        try:
            answer = reads.read(step)
        except Exception as error:  # Whatever it is, the trainer is to know.
            answer = _sent(error)
            answer.add_note(f"in a reading process:\n{traceback.format_exc()}")
        try:
            connection.send(answer)
        except OSError:
            return


def _sent(error: Exception) -> Exception:
    """As it is, if it can be sent: not all that need more than a message can."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class _Readers:
    """Threads that read, or that each ask a process to."""

    def __init__(self, reads: _Batches, worker_count: int):
        self._reads = reads
        self._processes = [_Process(reads) for _ in range(worker_count)]
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(worker_count or _THREADS)

    def submit(self, step: int) -> Future[_Read]:
        return self._threads.submit(self._read, step)

    def _read(self, step: int) -> _Read:
        if not self._processes:
            return self._reads.read(step)
        process = self._idle.get()
        try:
            return process.read(step)
        finally:
            self._idle.put(process)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.end()


class BatchIterator(Iterator[Batch]):
    """Endless batches, with the position and what has gone wrong so far.

    Attributes:
        step: the step whose batch `next` will return; all that a checkpoint needs.
        skipped: damaged samples met so far in delivered batches, name to reason.
        truncated: captions cut to the tokenizer's length in delivered batches.
    """

    def __init__(self, reads: _Batches, step: int, worker_count: int):
        self.step = step
        self.skipped: dict[str, str] = {}
        self.truncated = 0
        self._readers = _Readers(reads, worker_count)
        self._most = max(_AHEAD, 2 * worker_count)
        self._ahead: collections.deque[Future[_Read]] = collections.deque()
        # Also when nobody calls close: processes outlive signals.
        self._close = weakref.finalize(self, self._readers.close)

    def __next__(self) -> Batch:
        while len(self._ahead) < self._most:
            self._ahead.append(self._readers.submit(self.step + len(self._ahead)))
        # It leaves the queue once it is there: an interrupt loses no batch.
        read = self._ahead[0].result()
        self._ahead.popleft()
        self.step += 1
        self.skipped |= read.skipped
        self.truncated += read.truncated
        return read.batch

    def close(self) -> None:
        """Stops the reading threads or processes."""
        self._close()


def batch_at(
    source: Source, tokenizer: Tokenizer, *, batch_size: int, seed: int, step: int
) -> Batch:
    """The whole batch of one step, read in this thread."""
    return (
        _Batches(source, tokenizer, batch_size, seed, range(batch_size))
        .read(step)
        .batch
    )


def batches(
    source: Source,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    seed: int,
    start_step: int = 0,
    process_index: int = 0,
    process_count: int = 1,
    worker_count: int = 0,
) -> BatchIterator:
    """Batches `start_step`, `start_step + 1`, ... of the run given by `seed`.

    Args:
        batch_size: rows of the global batch, over all processes; this process gets
            rows [p b, (p + 1) b) with b = batch_size / process_count.
        worker_count: reading processes; 0 reads in threads of this one, which is the
            faster choice unless decoding images is the bottleneck. Never changes
            what is read.

    Raises:
        ValueError: the batch does not divide over the processes, or seed or start_step
            is negative.
        DataError: the source is empty.
    """
    if batch_size < 1 or batch_size % process_count:
        raise ValueError(
            f"the batch of {batch_size} does not divide over {process_count} "
            "processes; make it a positive multiple"
        )
    if seed < 0 or start_step < 0:
        raise ValueError(
            f"seed {seed} and start step {start_step} must not be negative"
        )
    if len(source) == 0:
        raise DataError("the data set has no samples")
    rows = batch_size // process_count
    reads = _Batches(
        source=source,
        tokenizer=tokenizer,
        batch_size=batch_size,
        seed=seed,
        rows=range(process_index * rows, (process_index + 1) * rows),
    )
    return BatchIterator(reads, start_step, worker_count)
