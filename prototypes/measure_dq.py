"""python3 prototypes/measure_dq.py OUT SECONDS: dQ with dS in FP16, centres; error and time."""

import json
import pathlib
import sys
import time
import traceback

sys.path.insert(0, ".")
import concurrent.futures as cf

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from attn_jax.audit.error import unit_error
from attn_jax.audit.inputs import FAMILIES, Shape, make_inputs
from attn_jax.formats import BF16
from attn_jax.kernels import attention as A
from attn_jax.kernels import tuning
from attn_jax.kernels.tuning import Tiling
from attn_jax.mask import Mask
from attn_jax.reference import golden

out, limit = pathlib.Path(sys.argv[1]), float(sys.argv[2])
out.mkdir(parents=True, exist_ok=True)
t0 = time.time()
log = open(out / "dq.jsonl", "a")


def put(**row):
    log.write(json.dumps(row) + "\n")
    log.flush()


VARIANTS = [("mean", "in"), ("mean", "f16"), ("row", "f16"), ("none", "f16")]
BASE_DQ = dict(tuning.BACKWARD_DQ)


def lower(v, shapes, causal):
    A.CENTRE, A.OPERAND = v
    H = shapes[0].shape[-1]
    tuning.BACKWARD_DQ = dict(BASE_DQ)
    if v[0] == "row":
        tuning.BACKWARD_DQ[64] = Tiling(64, 64, 2, 2)
    A._backward_program.cache_clear()
    A._forward_program.cache_clear()
    q, k, val, do = shapes
    if (q.shape, causal) not in FORWARD:
        fwd = A._forward_program(H**-0.5, causal, jnp.dtype(jnp.bfloat16), True)
        FORWARD[q.shape, causal] = pool.submit(
            jax.jit(lambda *a: fwd(*a)).lower(q, k, val).compile
        )
    lse = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
    bwd = A._backward_program(H**-0.5, causal, True)
    b = jax.jit(lambda *a: bwd(*a)).lower(q, k, val, do, lse, lse, q, q)
    return FORWARD[q.shape, causal], b


FORWARD = {}
pool = cf.ThreadPoolExecutor(12)
sds = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)
jobs = []
for H, causal in ((64, False), (128, False), (64, True), (128, True)):
    q, k = sds(2, 1024, 4, H), sds(2, 1024, 4, H)
    for v in VARIANTS:
        try:
            f, b = lower(v, (q, k, k, q), causal)
            jobs.append(("acc", H, 1024, causal, v, f, pool.submit(b.compile)))
        except Exception as e:
            put(kind="error", H=H, causal=causal, v=v, error=repr(e)[:300])
for H, S, causal in [
    (H, S, c) for S in (4096, 1024, 16384) for c in (False, True) for H in (128, 64)
]:
    q = sds(16384 // S, S, 2048 // H, H)
    for v in VARIANTS[:3]:
        try:
            f, b = lower(v, (q, q, q, q), causal)
            jobs.append(("time", H, S, causal, v, f, pool.submit(b.compile)))
        except Exception as e:
            put(kind="error", H=H, S=S, causal=causal, v=v, error=repr(e)[:300])
gold = {}
for kind, H, S, causal, v, f, b in sorted(jobs, key=lambda j: j[0] == "acc"):
    if time.time() - t0 > limit:
        put(kind="stopped")
        break
    try:
        f, b = f.result(), b.result()
        if kind == "time":
            key = jax.random.split(jax.random.key(0), 4)
            x = [
                jax.random.normal(kk, (16384 // S, S, 2048 // H, H), jnp.bfloat16)
                for kk in key
            ]
            o, low, lse = f(*x[:3])
            args = (*x[:3], x[3], lse, jnp.zeros_like(lse), o, low)
            _, rt = profiler.measure(b, iterations=8, aggregate=False)(*args)
            sums = {}
            for it in rt:
                for name, ms in it:
                    sums.setdefault(name, []).append(ms)
            total = float(np.median([sum(ms for _, ms in it) for it in rt]))
            flops = 2.5 * 4 * 16384 * S * 2048 * (0.5 if causal else 1)
            put(
                kind="time",
                H=H,
                S=S,
                causal=causal,
                v=v,
                ms=total,
                tflops=flops / total / 1e9,
                kernels={n: float(np.median(m)) for n, m in sums.items()},
            )
        else:
            for fam in FAMILIES:
                if (fam, H, causal) not in gold:
                    x = make_inputs(fam, 0, Shape(2, 1024, 1024, 4, 4, H), jnp.bfloat16)
                    gold[fam, H, causal] = (
                        x,
                        golden(*x, mask=Mask(is_causal=causal)),
                        (
                            golden(*x, mask=Mask(is_causal=causal), absolute=True)
                            if fam == "zero_k_one_v"
                            else None
                        ),
                    )
                x, g, ab = gold[fam, H, causal]
                o, low, lse = f(*x[:3])
                args = (*x[:3], x[3], lse, jnp.zeros_like(lse), o, low)
                dq, dk, dv = jax.device_get(b(*args))
                again = jax.device_get(b(*args))
                u = lambda a, n: float(
                    unit_error(
                        np.asarray(a),
                        getattr(g, n),
                        BF16,
                        None if ab is None else getattr(ab, n),
                    )
                )
                put(
                    kind="acc",
                    H=H,
                    causal=causal,
                    v=v,
                    family=fam,
                    dq=u(dq, "dquery"),
                    dk=u(dk, "dkey"),
                    dv=u(dv, "dvalue"),
                    same=bool(
                        (
                            np.asarray(dq).view(np.uint16)
                            == np.asarray(again[0]).view(np.uint16)
                        ).all()
                    ),
                )
    except Exception as e:
        put(kind="error", H=H, S=S, causal=causal, v=v, error=repr(e)[:500])
        traceback.print_exc()
put(kind="end", seconds=time.time() - t0)
