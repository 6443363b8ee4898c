"""JAX's test_sdpa_paged_attention passes whatever paged_attention returns.

    python jax_paged_test.py fused_attention_stablehlo_test.py    # JAX's file

Loads the test from JAX's own file, puts stand-ins in the place of paged_attention, and
runs it as it is and with the comparison repaired. A CPU will do: the guards that skip
the test off CUDA are lifted, and no stand-in needs cuDNN.
"""

import itertools
import sys
import unittest

import jax
import jax.numpy as jnp
from jax._src import test_util as jtu

jax.config.update("jax_platforms", "cpu")
jtu._get_device_tags = lambda: {"cuda"}
jtu.is_cuda_compute_capability_at_least = lambda _: True
jtu.is_cuda_version_at_least = lambda *_: False
PLAIN = open(sys.argv[1]).read()
CALL = "    sdpa_infer(q, k_container"
CHECK = "self.assertArraysAllClose(out_ref, out_ref, rtol=1e-2"
assert PLAIN.count(CALL) == PLAIN.count(CHECK) == 1
REPAIRED = PLAIN.replace(CALL, CALL.replace("sdpa", "out = sdpa", 1)).replace(
    CHECK, CHECK.replace("out_ref, out_ref", "out_ref, out")
)


def zeros(q, k, v, **_):
    return jnp.zeros_like(q)


def nans(q, k, v, **_):
    return jnp.full_like(q, jnp.nan)


def one_number(q, k, v, **_):
    return jnp.float32(42)


def right(q, k, v, *, page_table_k, page_table_v, **_):
    def unpaged(pages, table):
        return pages[table[:, 0, :, 0]].reshape(q.shape[0], -1, *pages.shape[2:])

    arrays = q, unpaged(k, page_table_k), unpaged(v, page_table_v)
    kind = q.dtype
    q, k, v = (x.astype(jnp.float32) for x in arrays)
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).astype(kind)


def run(source, stand_in):
    space = {"__name__": "loaded"}
    exec(compile(source, "test", "exec"), space)
    space["paged_attention"] = stand_in
    case = space["DotProductAttentionTest"]
    names = [n for n in unittest.TestLoader().getTestCaseNames(case) if "paged" in n]
    result = unittest.TestResult()
    unittest.TestSuite(map(case, names)).run(result)
    failed = len(result.failures) + len(result.errors) + len(result.skipped)
    if result.errors or result.skipped:
        print((result.errors or result.skipped)[0][1][-1500:])
    return f"{result.testsRun - failed} of {result.testsRun} pass"


print("jax", jax.__version__, jax.default_backend())
for (kind, source), stand_in in itertools.product(
    {"as it is": PLAIN, "repaired": REPAIRED}.items(), (zeros, nans, one_number, right)
):
    said = run(source, stand_in)
    print(f"{kind}, paged_attention is {stand_in.__name__}: {said}", flush=True)
