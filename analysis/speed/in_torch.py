"""PyTorch's attention, timed in a process of its own.

Two frameworks in one would share the card's memory and a CUDA context.

    python -m analysis.speed.in_torch gpu|cpu

One line of JSON a question on stdin, one an answer on stdout; the first answer, asked
or not, says which PyTorch this is, or why there is none:

    {"versions": {...}}                       or {"absent": "..."}
    {"case": {...}, "pass": "...", "implementations": [...], "seconds": ...,
     "inputs": FOLDER}                        they lie in FOLDER/FAMILY-QUERY.npy ...
    {"rows": [[name, columns], ...]}          results in FOLDER/NAME-FAMILY-TENSOR.npy
"""

import contextlib
import dataclasses
import functools
import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from analysis.record import Row
from analysis.speed import timing
from analysis.speed.cases import Case, Pass
from analysis.speed.errors import TENSORS, Results, pieces

# Row name -> the backend of torch.nn.attention.SDPBackend.
IMPLEMENTATIONS = {
    "torch-cudnn": "CUDNN_ATTENTION",
    "torch-flash": "FLASH_ATTENTION",
}
# The names of a case's inputs in a folder, as [B, L, N, H] of 16-bit integers.
INPUTS = ("query", "key", "value", "dout")


def main() -> None:
    """Answers until stdin ends."""
    device = {"gpu": "cuda", "cpu": "cpu"}[sys.argv[1]]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # Whatever libraries print must not mix with answers.
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    try:
        torch = importlib.import_module("torch")
        if device == "cuda" and not torch.cuda.is_available():
            raise ImportError(f"torch {torch.__version__} sees no GPU")
        answers.write(json.dumps({"versions": versions(torch)}) + "\n")
    except ImportError as error:
        answers.write(json.dumps({"absent": timing.reason(error)}) + "\n")
        return
    for line in sys.stdin:
        answers.write(json.dumps({"rows": _answer(device, json.loads(line))}) + "\n")
        if device == "cuda":
            torch.cuda.empty_cache()  # The card is the other framework's turn.


def versions(torch: Any) -> dict[str, str]:
    """Of PyTorch and of what it brings with it."""
    found = {"torch": torch.__version__, "torch_cuda": torch.version.cuda}
    if torch.backends.cudnn.is_available():
        found["torch_cudnn"] = torch.backends.cudnn.version()
    return {name: str(version) for name, version in found.items() if version}


def _answer(device: str, question: dict[str, Any]) -> list[tuple[str, Row]]:
    case, of = Case(**question["case"]), question["pass"]
    # JSON has lists only.
    case = dataclasses.replace(case, families=tuple(case.families))
    folder = Path(question["inputs"])
    builds = {
        name: functools.partial(_build, name, case, of, device, folder)
        for name in question["implementations"]
    }
    rows = []
    for name, row, results in timing.measure(builds, question["seconds"]):
        saved = []
        for family, arrays in results.items():
            for tensor, x in arrays.items():
                np.save(folder / f"{name}-{family}-{tensor}.npy", x)
                saved.append((family, tensor))
        rows.append((name, row | {"results": saved}))
    return rows


def _build(name: str, case: Case, of: Pass, device: str, folder: Path) -> timing.Arm:
    """Prepares a pass of an implementation and runs it at least twice."""
    torch = importlib.import_module("torch")
    mask = None
    if case.mask not in ("full", "causal"):
        if name == "torch-flash":
            raise NotImplementedError("this backend takes no mask but the causal one")
        rules = case.rules.materialise(case.T, case.S)
        mask = torch.from_numpy(np.array(rules)).to(device)

    @contextlib.contextmanager
    def chosen() -> Iterator[None]:
        attention = importlib.import_module("torch.nn.attention")
        backend = getattr(attention.SDPBackend, IMPLEMENTATIONS[name])
        with attention.sdpa_kernel(backend), torch.set_grad_enabled(of != "forward"):
            yield

    def once(run: Callable[[], tuple]) -> dict[str, Any]:
        with chosen():
            results = run()
        if device == "cuda":
            torch.cuda.synchronize()
        return {
            tensor: x.detach().transpose(1, 2)
            for tensor, x in zip(TENSORS[of], results, strict=True)
        }

    def prepared(family: str) -> Callable[[], tuple]:
        with chosen():
            return _prepare(torch, case, of, mask, device, folder, family)

    run = prepared(case.families[0])
    began = time.monotonic()
    found = once(run)
    seconds = time.monotonic() - began
    again = once(run)
    columns: Row = {
        # Nothing is compiled; what the first call takes longer is its preparation.
        "compile_seconds": seconds,
        "same_bits": all(_bits_equal(torch, x, again[k]) for k, x in found.items()),
        "deterministic": False,
        "config": "" if mask is None else "mask as an array of T x S",
    }
    results = {case.families[0]: _fetch(torch, case, found)}
    del again, found
    for family in case.families[1:]:
        results[family] = _fetch(torch, case, once(prepared(family)))
    with chosen():
        columns |= _kernels(torch, run) if device == "cuda" else {}
    columns["timer"] = "CUDA events" if device == "cuda" else "wall clock"
    return timing.Arm(
        functools.partial(_time, torch, device, chosen, run), columns, results
    )


def _prepare(
    torch: Any, case: Case, of: Pass, mask: Any, device: str, folder: Path, family: str
) -> Callable[[], tuple]:
    """A run of a pass, with its inputs on the device and what it needs done before."""
    dtype = getattr(torch, case.dtype)

    def put(name: str) -> Any:
        """An input as PyTorch's [B, N, L, H], laid out as JAX has it."""
        bits = torch.from_numpy(np.load(folder / f"{family}-{name}.npy"))
        return bits.to(device).view(dtype).transpose(1, 2)

    query, key, value, dout = (put(name) for name in INPUTS)
    wanted = () if of == "forward" else (query, key, value)
    for x in wanted:
        x.requires_grad_()

    def attend() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=case.mask == "causal",
            enable_gqa=case.N != case.K,
        )

    kept = attend() if of == "backward" else None

    def run() -> tuple:
        if kept is not None:
            return torch.autograd.grad(kept, wanted, dout, retain_graph=True)
        out = attend()
        return (out, *torch.autograd.grad(out, wanted, dout)) if wanted else (out,)

    return run


def _bits_equal(torch: Any, x: Any, y: Any) -> bool:
    x, y = (array.contiguous().view(torch.int16) for array in (x, y))
    return bool(torch.equal(x, y))


def _fetch(torch: Any, case: Case, found: dict[str, Any]) -> dict[str, np.ndarray]:
    """The stacked `errors.pieces`, as 16-bit integers: NumPy's files know no BF16."""
    return {
        t: torch.stack(pieces(case, t, x)).view(torch.int16).cpu().numpy()
        for t, x in found.items()
    }


def restored(case: Case, name: str, row: Row, folder: Path) -> Results:
    """The results of an implementation, whose row no longer names them after this."""
    narrow = ml_dtypes.bfloat16 if case.dtype == "bfloat16" else np.dtype(case.dtype)
    results: Results = {}
    for family, tensor in row.pop("results"):
        x = np.load(folder / f"{name}-{family}-{tensor}.npy").view(narrow)
        results.setdefault(family, {})[tensor] = x
    return results


def _time(
    torch: Any,
    device: str,
    chosen: Callable[[], contextlib.AbstractContextManager[None]],
    run: Callable[[], Any],
    runs: int,
) -> float:
    """Milliseconds of a run: between two events on the card, or on the wall clock."""
    with chosen():
        if device != "cuda":
            began = time.perf_counter()
            for _ in range(runs):
                run()
            return 1e3 * (time.perf_counter() - began) / runs
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # While this one runs the next are launched: the card does not wait for Python.
        run()
        first.record()
        for _ in range(runs):
            run()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / runs


def _kernels(torch: Any, run: Callable[[], Any]) -> Row:
    """The longest kernel and how many there are; nothing if the profiler fails."""
    profiler = torch.profiler
    try:
        with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
        cuda = torch.autograd.DeviceType.CUDA
        kernels = [
            (event.time_range.elapsed_us(), event.name)
            for event in profile.events()
            if event.device_type == cuda
        ]
        return {"kernel": max(kernels)[1], "kernels": len(kernels)}
    except (AttributeError, RuntimeError, ValueError):
        return {}  # The times do not depend on it.


if __name__ == "__main__":
    main()
