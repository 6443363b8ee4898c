"""Builds, checks and times the variants of hopper_forward_next on an H200.

    python3 prototypes/measure_forward.py OUT_FOLDER SECONDS [--only SUBSTRING] [--workers N]
    python3 prototypes/measure_forward.py --dry-run [--only SUBSTRING]   (no GPU: sm_90a)

One JSON line per result in OUT_FOLDER/forward.jsonl. Workers (processes) compile side by
side; one at a time has the GPU. A worker that fails, hangs or dies loses one variant.
"""

import collections
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.dirname(os.path.abspath(__file__))]

# (D, S, causal), most informative first.
CASES = [
    (64, 4096, 0), (128, 1024, 0), (64, 1024, 0), (64, 4096, 1), (128, 4096, 1),
    (128, 16384, 0), (64, 16384, 0), (128, 4096, 0), (128, 1024, 1), (64, 1024, 1),
    (128, 16384, 1), (64, 16384, 1),
]  # fmt: skip
F = "stages=4,value_stages=4"
Q = "q_registers=True"
A, W3 = f"ahead=True,{F}", f"warpgroups=3,{F}"
A64 = f"ahead=True,columns=64,{F}"
# tier -> head dim -> plans ("present" is hopper_forward; residual is no part of a Plan).
VARIANTS = {
    64: [
        ["present", A, W3, f"{F},{Q}", F, f"{W3},polynomial=1", f"{W3},polynomial=2", f"{A},polynomial=2"],
        [f"{A},persistent=False", f"{W3},persistent=False", f"{A},residual=True", "present,residual=True", f"{W3},residual=True", f"{F},{Q},polynomial=2"],
        [f"{A64},warpgroups=3", f"columns=64,warpgroups=4,{F}", f"{A},polynomial=1", f"{A},polynomial=3", f"{W3},polynomial=3", "ahead=True,stages=3,value_stages=3", f"{F},{Q},arg_max=True", f"{F},{Q},polynomial=1"],
        [f"{W3},polynomial=2,degree=4", f"{A},partial_sums=False", f"{A},snake=False", "columns=192,stages=2,value_stages=2", f"{F},persistent=False", f"columns=64,warpgroups=4,{F},polynomial=2", f"{A64},warpgroups=3,polynomial=2", "stages=2,value_stages=2"],
    ],
    128: [
        ["present", "stages=2", f"stages=2,{Q}", f"{A64},{Q}", A64, "stages=2,persistent=False"],
        ["stages=3", f"stages=2,{Q},residual=True", "present,residual=True", f"stages=2,{Q},polynomial=2", f"{W3},columns=64,own_out=False"],
        ["stages=2,own_out=False", f"{A64},{Q},polynomial=2", "stages=2,snake=False", "stages=2,arg_max=True", f"stages=2,{Q},polynomial=1", "stages=2,partial_sums=False", f"stages=2,{Q},persistent=False"],
    ],
}  # fmt: skip


def jobs(only=""):
    """(case, [variants]) in order of interest; a job is one worker's."""
    for tier in range(TIERS):
        for case in CASES:
            tiers = VARIANTS[case[0]]
            if tier < len(tiers):
                names = [n for n in tiers[tier] if only in f"{case} {n}"]
                size = 8 if tier else 4 if case[0] == 64 else 3
                for start in range(0, len(names), size):
                    yield case, names[start : start + size]


def parse(name):
    parts = [p for p in name.split(",") if p]
    present = "present" in parts
    options = {}
    for part in parts:
        if part != "present":
            key, value = part.split("=")
            options[key] = (
                {"True": True, "False": False}.get(value)
                if value in ("True", "False")
                else int(value)
            )
    return present, options.pop("residual", False), options


def function(case, name):
    import hopper_forward_next
    import jax.numpy as jnp

    from attn_jax.kernels import hopper_forward, tuning

    D, S, causal = case
    present, residual, options = parse(name)
    shared = dict(
        query_count=S,
        key_count=S,
        scale=D**-0.5,
        is_causal=bool(causal),
        residual=residual,
    )
    if present:
        return lambda q, k, v: hopper_forward.forward(
            q, k, v, **shared, tiling=tuning.FORWARD[D], out_dtype=jnp.dtype(q.dtype)
        )
    plan = hopper_forward_next.Plan(**options)
    return lambda q, k, v: hopper_forward_next.forward(q, k, v, **shared, plan=plan)


def shape(case):
    D, S, _ = case
    return 16384 // S, S, 2048 // D, D


def gflop(case):
    B, S, N, D = shape(case)
    return 4 * B * N * S * S * D / (2 if case[2] else 1) / 1e9


# ---------------------------------------------------------------- worker


def worker():
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Whatever libraries print must not mix with answers.

    def say(**message):
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    def gpu():
        say(want="gpu")
        assert sys.stdin.readline().strip() == "go"

    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental.mosaic.gpu import profiler

    def times(f, args, iterations):
        _, t = profiler.measure(f, iterations=iterations, aggregate=True)(*args)
        return [float(x) for x in (t if isinstance(t, (list, tuple)) else [t])]

    @jax.jit
    def compare(out, lse, out0, lse0):
        a, b = out.astype(jnp.float32), out0.astype(jnp.float32)
        return (jnp.sqrt(jnp.sum((a - b) ** 2) / jnp.sum(b**2)), jnp.max(jnp.abs(a - b)), jnp.max(jnp.abs(lse - lse0)),
                jnp.all(jnp.isfinite(a)) & jnp.all(jnp.isfinite(lse)))  # fmt: skip

    cache = {}
    say(ready=True)
    for line in sys.stdin:
        job = json.loads(line)
        case = tuple(job["case"])
        B, S, N, D = shape(case)
        try:
            aval = jax.ShapeDtypeStruct((B, S, N, D), jnp.bfloat16)
            avals = (aval,) * 3
            if case not in cache:
                cache.clear()
                prepared = cache[case] = {}
                try:
                    cudnn = (
                        jax.jit(
                            lambda q, k, v: jax.nn.dot_product_attention(
                                q, k, v, is_causal=bool(case[2]), implementation="cudnn"
                            )
                        )
                        .lower(*avals)
                        .compile()
                    )
                except Exception as error:
                    cudnn = None
                    print("cuDNN", case, repr(error)[:500], file=sys.stderr, flush=True)
                present = jax.jit(function(case, "present")).lower(*avals).compile()
                inputs = (
                    jax.jit(
                        lambda: [
                            jax.random.normal(k, (B, S, N, D), jnp.bfloat16)
                            for k in jax.random.split(jax.random.key(0), 3)
                        ]
                    )
                    .lower()
                    .compile()
                )
                lse_aval = jax.ShapeDtypeStruct((B, N, S), jnp.float32)
                prepared["compare"] = compare.lower(
                    aval, lse_aval, aval, lse_aval
                ).compile()
                gpu()
                args = jax.block_until_ready(inputs())
                expected = jax.block_until_ready(present(*args))
                rel = None
                if cudnn is not None:
                    rel = float(
                        prepared["compare"](
                            cudnn(*args), expected[2], expected[0], expected[2]
                        )[0]
                    )
                prepared.update(cudnn=cudnn, args=args, expected=expected)
                say(done="prepared", cudnn_rel=rel)
            prepared = cache[case]
            cudnn, args, expected = (
                prepared[key] for key in ("cudnn", "args", "expected")
            )
        except Exception as error:
            cache.clear()
            say(done="failed", error=f"{type(error).__name__} {error}"[:600])
            say(finished=True)
            continue
        for name in job["variants"]:
            say(start=name)
            try:
                began = time.time()
                f = jax.jit(function(case, name)).lower(*avals).compile()
                seconds = time.time() - began
                gpu()
                began = time.time()
                out, low, lse, *_ = jax.block_until_ready(f(*args))
                rel, most, lse_most, finite = (
                    float(x)
                    for x in prepared["compare"](out, lse, expected[0], expected[2])
                )
                ours, theirs = [], []
                for _ in range(2):
                    theirs += (
                        times(cudnn, args, 4) if cudnn is not None else [float("nan")]
                    )
                    ours += times(f, args, 7)
                mine, his = float(np.median(ours)), float(np.median(theirs))
                del out, low, lse, _
                say(done="timed", name=name, tflops=round(gflop(case) / mine, 1), cudnn=round(gflop(case) / his, 1), ratio=round(his / mine, 4),
                    best=round(gflop(case) / min(ours), 1), out_rel=rel, out_max=most, lse_max=lse_most, finite=bool(finite),
                    ok=bool(finite and rel < 4e-3 and lse_max_ok(lse_most)), ms=ours, cudnn_ms=theirs, compile_s=round(seconds, 1), gpu_s=round(time.time() - began, 1))  # fmt: skip
            except Exception as error:
                say(
                    done="failed",
                    name=name,
                    error=f"{type(error).__name__} {error}"[:600],
                )
        say(finished=True)


def lse_max_ok(x):
    return x < 2e-5


# ---------------------------------------------------------------- parent


class Worker:
    def __init__(self):
        environment = dict(
            os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false", PYTHONPATH=ROOT
        )
        self.log = open(os.path.join(OUT, f"worker-{threading.get_ident()}.log"), "a")
        self.process = subprocess.Popen([sys.executable, os.path.abspath(__file__), "--worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.log, text=True, bufsize=1, env=environment, cwd=ROOT)  # fmt: skip
        self.lines = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            try:
                self.lines.put(json.loads(line))
            except ValueError:
                pass
        self.lines.put({"died": True})

    def tell(self, text):
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def hear(self, seconds):
        try:
            return self.lines.get(timeout=max(0.1, min(seconds, END - time.time())))
        except queue.Empty:
            return {"late": True}

    def kill(self):
        self.process.kill()


GPU = threading.Lock()
WRITE = threading.Lock()
COMPILE_LIMIT, GPU_LIMIT = 90, 25


def record(**line):
    line["at"] = round(time.time() - BEGAN, 1)
    with WRITE, open(os.path.join(OUT, "forward.jsonl"), "a") as f:
        f.write(json.dumps(line) + "\n")
    short = {
        k: v for k, v in line.items() if k not in ("ms", "cudnn_ms", "gpu_s", "best")
    }
    print(json.dumps(short), flush=True)


def serve(work):
    current, case = None, None
    while time.time() < END:
        with WRITE:
            if not work:
                break
            # What the worker is prepared for, unless that means jumping a long queue.
            near = [job for job in itertools.islice(work, 10) if job[0] == case]
            job = near[0] if near else work[0]
            work.remove(job)
        case, variants = job
        left = list(variants)
        while left and time.time() < END - 2:
            if current is None:
                current = Worker()
                if not current.hear(COMPILE_LIMIT).get("ready"):
                    record(case=case, failed="worker did not start")
                    current.kill()
                    current = None
                    break
            name, bad = "preparation", None
            try:
                current.tell(json.dumps({"case": case, "variants": left}))
                while True:
                    message = current.hear(COMPILE_LIMIT)
                    if "finished" in message:
                        left = []
                        break
                    if "start" in message:
                        name = message["start"]
                    if message.get("want") == "gpu":
                        with GPU:
                            if time.time() > END - 1:
                                bad = "out of time"
                                break
                            current.tell("go")
                            message = current.hear(GPU_LIMIT)
                    if "late" in message or "died" in message:
                        bad = "hung or out of time" if "late" in message else "died"
                        break
                    if message.get("done") == "timed":
                        record(
                            case=case,
                            **{k: v for k, v in message.items() if k != "done"},
                        )
                        left.remove(message["name"])
                    if message.get("done") == "failed":
                        record(
                            case=case,
                            name=message.get("name", name),
                            failed=message["error"],
                        )
                        if message.get("name") in left:
                            left.remove(message["name"])
            except OSError as error:
                bad = repr(error)
            if bad:
                record(case=case, name=name, failed=bad)
                current.kill()
                current = None
                if name in left:
                    left = left[left.index(name) + 1 :] + []
                elif name == "preparation":
                    break
    if current is not None:
        current.kill()


def summary():
    best = collections.defaultdict(list)
    with open(os.path.join(OUT, "forward.jsonl")) as f:
        for line in map(json.loads, f):
            if "tflops" in line:
                best[tuple(line["case"])].append(line)
    for case, lines in best.items():
        lines.sort(key=lambda x: -x["ratio"])
        print(f"D={case[0]} S={case[1]} {'causal' if case[2] else 'full'}")
        for x in lines:
            print(
                f"   {x['tflops']:6.1f} / {x['cudnn']:6.1f} = {x['ratio']:.3f}  {'' if x['ok'] else 'WRONG '}rel {x['out_rel']:.1e} lse {x['lse_max']:.1e}  {x['name']}"
            )


def main():
    work = collections.deque(jobs(ONLY))
    threads = [
        threading.Thread(target=serve, args=(work,), daemon=True)
        for _ in range(WORKERS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.1, END + 3 - time.time()))
    summary()
    sys.stdout.flush()
    os._exit(0)


# ---------------------------------------------------------------- no GPU


def dry_run():
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp

    from tests.gpu_compiler import compiled

    seen = set()
    order = [(case, name) for case, names in jobs(ONLY) for name in names]
    for case, name in order:
        if not ALL_LENGTHS and (case[0], case[2], name) in seen:
            continue
        seen.add((case[0], case[2], name))
        x = jax.ShapeDtypeStruct(shape(case), jnp.bfloat16)
        began = time.time()
        try:
            (kernel,) = compiled(function(case, name), x, x, x).kernels
            good = not kernel.serialised and kernel.spilled_bytes == 0
            print(
                "good" if good else "LOOK",
                case,
                name,
                f"spilled {kernel.spilled_bytes}",
                "SERIALISED" if kernel.serialised else "",
                kernel.order,
                f"{time.time() - began:.0f}s",
                flush=True,
            )
        except Exception as error:
            print(
                "FAIL", case, name, f"{type(error).__name__} {error}"[:300], flush=True
            )


if __name__ == "__main__":
    arguments = sys.argv[1:]

    def option(name, default):
        if name in arguments:
            index = arguments.index(name)
            value = arguments[index + 1]
            del arguments[index : index + 2]
            return value
        return default

    ONLY, WORKERS = option("--only", ""), int(option("--workers", "9"))
    TIERS = int(option("--tiers", "4"))
    ALL_LENGTHS = "--all-lengths" in arguments
    if "--worker" in arguments:
        worker()
    elif "--dry-run" in arguments:
        dry_run()
    else:
        OUT, BEGAN = os.path.abspath(arguments[0]), time.time()
        END = BEGAN + float(arguments[1]) - 6
        os.makedirs(OUT, exist_ok=True)
        main()
