"""Builds, checks and times variants of the fused backward on one H200.

python3 prototypes/measure_fused.py OUT_FOLDER SECONDS [--workers W] [--dry-run]
One JSON line per result goes to OUT_FOLDER/fused.jsonl at once. Several worker processes compile; one at
a time, under a file lock, uses the GPU. A worker whose job hangs is killed and replaced.
"""

import argparse
import fcntl
import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.dirname(os.path.abspath(__file__))]

CASES = [
    (128, 4096, 0),
    (64, 4096, 0),
    (128, 16384, 1),
    (64, 16384, 1),
    (128, 16384, 0),
    (64, 16384, 0),
    (128, 4096, 1),
    (64, 4096, 1),
    (128, 1024, 0),
    (64, 1024, 0),
    (128, 1024, 1),
    (64, 1024, 1),
]


def variants(D, causal):
    """[(tier, Plan keywords)]: tier 0 unordered, main; 1 ordered, main; 2 the rest, unordered; 3 the rest, ordered."""
    st = dict(store="storer")
    if D == 128:
        free = [
            (0, {}),
            (0, dict(excess=False)),
            (0, st),
            (0, dict(order="late")),
            (0, dict(order="late", **st)),
            (0, dict(order="pair", excess=False)),
            (2, dict(order="pair", excess=False, **st)),
            (0, dict(bare=True, **st)),
            (0, dict(bare=True)),
            (0, dict(order="late", bare=True, **st)),
            (2, dict(bare=True, excess=False, **st)),
            (2, dict(order="late", bare=True, excess=False)),
            (2, dict(order="late", excess=False)),
            (2, dict(tight=True)),
            (2, dict(order="late", tight=True)),
            (2, dict(excess=False, stages=3)),
            (2, dict(order="late", excess=False, stages=3)),
            (2, dict(excess=False, **st)),
            (2, dict(order="pair", excess=False, stages=1)),
        ]
        ordered = [
            (1, {}),
            (1, dict(bare=True)),
            (1, dict(order="late")),
            (1, dict(order="pair", excess=False)),
            (3, dict(excess=False)),
            (3, dict(order="late", excess=False)),
        ]
    else:
        q = dict(queries=128)
        free = [
            (0, q),
            (0, dict(order="late", **q)),
            (0, dict(order="third")),
            (0, dict(order="third", stages=3)),
            (0, dict(order="pair", stages=4)),
            (0, dict(order="ahead", stages=4)),
            (0, dict(order="ahead", stages=4, **st)),
            (0, dict(order="third", stages=3, bare=True)),
            (0, dict(order="ahead", stages=4, bare=True)),
            (0, dict(queries=128, bare=True)),
            (2, dict(order="third", excess=False)),
            (2, dict(order="ahead", stages=4, excess=False)),
            (2, dict(order="ahead", stages=4, bare=True, **st)),
            (2, dict(order="pair", stages=4, bare=True)),
            (2, dict(excess=False, **q)),
            (2, dict(order="pair", stages=4, **st)),
            (2, dict(order="pair", stages=2)),
            (2, dict(**q, **st)),
            (2, dict(tight=True, **q)),
            (2, dict(order="late", **q, **st)),
            (2, dict(order="ahead", stages=2)),
            (2, dict(order="third", stages=3, excess=False)),
        ]
        ordered = [
            (1, dict(order="third")),
            (1, dict(order="third", stages=3, bare=True)),
            (1, dict(order="ahead", stages=4, bare=True)),
            (1, dict(order="ahead", stages=4)),
            (1, q),
            (3, dict(order="pair", stages=4)),
            (3, dict(order="late", **q)),
            (3, dict(order="third", stages=3)),
        ]
    if causal:
        free.append((2, dict(free[0][1], schedule="alternate")))
    else:
        free.append((2, dict(free[0][1], shift=False)))
    return free + [
        (t, {**kw, **({} if kw.get("order") == "third" else st), "ordered": True})
        for t, kw in ordered
    ]


def jobs():
    out = []
    for i, (D, S, c) in enumerate(CASES):
        late = 0 if i < 2 else 1 if i < 6 else 2  # groups of cases
        for what in ("cudnn", "ours"):
            out.append(((late, 0, i), dict(case=(D, S, c), what=what)))
        for tier, kw in variants(D, c):
            rank = {
                0: (late, 0, i),
                1: (late, 1, i),
                2: (late + 2, 0, i),
                3: (late + 2, 1, i),
            }[tier]
            out.append((rank, dict(case=(D, S, c), what="fused", plan=kw)))
    out.sort(key=lambda x: x[0])
    return [j for _, j in out]


# ---------------------------------------------------------------- worker
def worker(dry):
    import functools

    import numpy as np

    if dry:
        os.environ["JAX_PLATFORMS"] = "cpu"
    import hopper_backward_fused as F
    import jax
    import jax.numpy as jnp

    from attn_jax.kernels import attention

    lock = open(os.environ["GPU_LOCK"], "w")

    def say(kind, **x):
        print("@" + json.dumps(dict(kind=kind, **x)), flush=True)

    def arrays(D, S):
        B, N = 16384 // S, 2048 // D
        return [
            jax.random.normal(k, (B, S, N, D), jnp.bfloat16)
            for k in jax.random.split(jax.random.key(0), 4)
        ]

    def shapes(D, S):
        B, N = 16384 // S, 2048 // D
        t, r = (
            jax.ShapeDtypeStruct((B, S, N, D), jnp.bfloat16),
            jax.ShapeDtypeStruct((B, N, S), jnp.float32),
        )
        return t, r

    def fused(plan, D, causal):
        return lambda q, k, v, do, lse, dlse, out, low: F.backward(
            q,
            k,
            v,
            do,
            lse,
            dlse,
            out,
            low,
            scale=D**-0.5,
            is_causal=bool(causal),
            plan=plan,
        )

    def ours(D, causal):
        return lambda q, k, v, do, lse, dlse, out, low: attention._local_backward(
            q, k, v, do, lse, dlse, out, low, scale=D**-0.5, is_causal=bool(causal)
        )

    def forward(D, causal):
        return lambda q, k, v: attention._local_forward(
            q,
            k,
            v,
            scale=D**-0.5,
            is_causal=bool(causal),
            out_dtype=jnp.dtype(jnp.bfloat16),
            residual=True,
        )

    @functools.lru_cache(maxsize=2)
    def programs(D, S, causal):
        t, r = shapes(D, S)
        return jax.jit(forward(D, causal)).lower(t, t, t).compile(), jax.jit(
            ours(D, causal)
        ).lower(t, t, t, t, r, r, t, t).compile()

    @functools.lru_cache(maxsize=2)
    def setting(D, S, causal):
        q, k, v, do = arrays(D, S)
        run, reference = programs(D, S, causal)
        out, low, lse = run(q, k, v)
        args = (q, k, v, do, lse, jnp.zeros_like(lse), out, low)
        return args, jax.block_until_ready(reference(*args))

    def rel(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return float(jnp.sqrt(jnp.sum((a - b) ** 2) / jnp.sum(b**2)))

    def timed(f, args, iterations=8):
        from jax.experimental.mosaic.gpu import profiler

        jax.block_until_ready(f(*args))
        _, runs = profiler.measure(f, iterations=iterations, aggregate=False)(*args)
        total = float(np.median([sum(t for _, t in r) for r in runs]))
        parts = {}
        for r in runs:
            one = {}
            for name, t in r:
                one[name[:60]] = one.get(name[:60], 0) + t
            for name, t in one.items():
                parts.setdefault(name, []).append(t)
        return total, {n: round(float(np.median(t)), 4) for n, t in parts.items()}

    for line in sys.stdin:
        job = json.loads(line)
        D, S, c = job["case"]
        what = job["what"]
        flops = (
            10 * 16384 * S * 2048 / (2 if c else 1) / 1e9
        )  # per ms -> TFLOP/s; B*N*D*S = 16384*2048
        result = dict(job)
        t0 = time.time()
        try:
            t, r = shapes(D, S)
            low = t
            args = (t, t, t, t, r, r, t, low)
            plan = F.Plan(**job["plan"]) if what == "fused" else None
            if dry:
                if what == "cudnn":
                    say("done", result=dict(result, skipped=True))
                    continue
                from tests.gpu_compiler import compiled

                p = compiled(fused(plan, D, c) if plan else ours(D, c), *args)
                result["kernels"] = [
                    dict(
                        name=k.name,
                        spill=k.spilled_bytes,
                        serialised=k.serialised,
                        order=k.order,
                    )
                    for k in p.kernels
                ]
            elif what == "cudnn":
                fwd = lambda q, k, v: jax.nn.dot_product_attention(
                    q, k, v, is_causal=bool(c), implementation="cudnn"
                )
                both = lambda q, k, v, do: (lambda y: (y[0], y[1](do)))(
                    jax.vjp(fwd, q, k, v)
                )
                say("lock")
                fcntl.flock(lock, fcntl.LOCK_EX)
                say("run")
                q, k, v, do = arrays(D, S)
                tf, _ = timed(jax.jit(fwd), (q, k, v))
                tb, parts = timed(jax.jit(both), (q, k, v, do))
                result.update(
                    ms=tb - tf, forward_ms=tf, tflops=flops / (tb - tf), parts=parts
                )
            else:
                reference = programs(D, S, c)[1]
                f = (
                    jax.jit(fused(plan, D, c)).lower(*args).compile()
                    if plan
                    else reference
                )
                result["compile_s"] = round(time.time() - t0, 1)
                say("lock")
                fcntl.flock(lock, fcntl.LOCK_EX)
                say("run")
                real, want = setting(D, S, c)
                got = jax.block_until_ready(f(*real))
                result["error"] = {
                    n: rel(g, w) for n, g, w in zip(("dq", "dk", "dv"), got, want)
                }
                again = f(*real)
                result["same_bits"] = [
                    bool(jnp.all(g == a)) for g, a in zip(got, again)
                ]
                total, parts = timed(f, real)
                result.update(ms=total, tflops=flops / total, parts=parts)
                kernel = [t for n, t in parts.items() if "fused" in n]
                if kernel:
                    result["kernel_tflops"] = flops / sum(kernel)
        except Exception as e:
            result["exception"] = repr(e)[:600]
            result["trace"] = traceback.format_exc()[-600:]
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)
        result["seconds"] = round(time.time() - t0, 1)
        say("done", result=result)


# ---------------------------------------------------------------- parent
def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("out")
    ap.add_argument("seconds", type=float)
    ap.add_argument("--workers", type=int, default=5)
    ap.add_argument("--dry-run", action="store_true")
    ap.add_argument("--worker", action="store_true")
    ap.add_argument("--run-limit", type=float, default=60)
    ap.add_argument("--only", default="")
    a = ap.parse_args()
    if a.worker:
        return worker(a.dry_run)
    os.makedirs(a.out, exist_ok=True)
    start = time.time()
    end = start + a.seconds
    env = dict(
        os.environ,
        GPU_LOCK=os.path.join(a.out, "lock"),
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
        PYTHONUNBUFFERED="1",
    )
    todo = [j for j in jobs() if not a.only or a.only in json.dumps(j)]
    if a.dry_run:  # a case's length changes nothing in the program's structure
        todo = [j for j in todo if j["case"][1] == 4096 and j["what"] != "cudnn"]
    print(len(todo), "jobs", flush=True)
    mutex = threading.Lock()
    results = open(os.path.join(a.out, "fused.jsonl"), "a")
    state = dict(left=todo)

    def write(x):
        with mutex:
            results.write(json.dumps(x) + "\n")
            results.flush()
            os.fsync(results.fileno())
        if "exception" in x or "killed" in x:
            tail = x.get("exception", x.get("killed"))[:200]
        else:
            tail = f"{x.get('tflops', 0):.0f} TFLOP/s kernel {x.get('kernel_tflops', 0):.0f} {x.get('error', '')} {x.get('same_bits', '')} {x.get('kernels', '')}"
        print(
            f"{time.time() - start:.0f}s",
            x["case"],
            x["what"],
            x.get("plan", ""),
            tail,
            flush=True,
        )

    def serve(number):
        proc = None
        while time.time() < end:
            with mutex:
                if not state["left"]:
                    break
                job = state["left"].pop(0)
            if proc is None or proc.poll() is not None:
                proc = subprocess.Popen(
                    [sys.executable, os.path.abspath(__file__), a.out, "0", "--worker"]
                    + ["--dry-run"] * a.dry_run,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=open(os.path.join(a.out, f"worker{number}.log"), "a"),
                    text=True,
                    env=env,
                    cwd=ROOT,
                )
                lines = queue.Queue()
                threading.Thread(
                    target=lambda p=proc, q=lines: (
                        [q.put(x) for x in p.stdout] and None or q.put(None)
                    ),
                    daemon=True,
                ).start()
            try:
                proc.stdin.write(json.dumps(job) + "\n")
                proc.stdin.flush()
            except OSError as e:
                write(dict(job, exception=repr(e)))
                proc.kill()
                continue
            stage, limit = "compile", time.time() + 240
            while True:
                try:
                    line = lines.get(timeout=max(0.1, min(limit, end) - time.time()))
                except queue.Empty:
                    proc.kill()
                    proc.wait()
                    if time.time() < end:
                        write(dict(job, killed=f"too long in stage {stage}"))
                    break
                if line is None:
                    proc.wait()
                    write(
                        dict(
                            job,
                            killed=f"worker ended with {proc.returncode} in stage {stage}",
                        )
                    )
                    break
                if not line.startswith("@"):
                    continue
                x = json.loads(line[1:])
                if x["kind"] == "lock":
                    stage, limit = "lock", time.time() + 600
                elif x["kind"] == "run":
                    stage, limit = "run", time.time() + a.run_limit
                else:
                    write(x["result"])
                    break
        if proc and proc.poll() is None:
            proc.kill()
            proc.wait()

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(a.workers)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    print("left over:", len(state["left"]), flush=True)


if __name__ == "__main__":
    main()
