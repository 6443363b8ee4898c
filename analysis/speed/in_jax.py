"""The implementations that run in JAX, as arms to be timed."""

import contextlib
import dataclasses
import functools
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from analysis.agreement import same_bits
from analysis.kernel_options import OPTIONS, recipe_of
from analysis.record import Row
from analysis.speed import timing
from analysis.speed.cases import Case, Pass
from analysis.speed.errors import TENSORS, Results, inputs_of, pieces
from attn_jax import dot_product_attention
from attn_jax.api import Implementation
from attn_jax.mask import Mask
from attn_jax.recipe import Architecture, Recipe
from attn_jax.timing import device_time

# Row name -> whether it promises the same bits on every run; None if nothing is said.
IMPLEMENTATIONS: dict[str, bool | None] = {
    "pallas": True,
    "pallas-fused": True,
    "pallas-two-kernels": True,
    "pallas-ampere": True,
    "pallas-no-cures": True,
    "pallas-row-centre": True,
    "pallas-p-dp": True,
    "pallas-bf16-weights": True,
    "pallas-lazy-rescale": True,
    "pallas-repeated-max": True,
    "cudnn": False,
    "cudnn-deterministic": True,
    "xla": True,
    "tokamax": None,
    "emulated": True,
    "reference": True,
}
# Ours for one architecture, on whatever GPU there is: Ampere's run on later ones, too.
MADE_FOR: dict[str, Architecture] = {"pallas-ampere": "ampere"}
# Ours with something named, timed on request.
NAMED = (*MADE_FOR, *OPTIONS)
# Libraries of others: what they cannot do is theirs.
PEERS = ("cudnn", "cudnn-deterministic", "xla", "tokamax")
# Those that keep an array of T x S logits for each head, and the most of them: what is
# left of the card holds what their backward pass makes of it.
_WHOLE_ROWS = ("xla", "reference")
_MOST_LOGITS = 2**34

# (query, key, value, numbers of documents if there are any) -> out
Attention = Callable[..., Array]


def measure(
    case: Case, of: Pass, names: Sequence[str], seconds: float
) -> Iterator[tuple[str, Row, Results]]:
    """Name, columns and results of each implementation, timed in turn."""
    arrays = _on_device(case, case.families[0])
    builds = {name: functools.partial(_build, name, case, of, arrays) for name in names}
    yield from timing.measure(builds, seconds)


def _on_device(case: Case, family: str) -> tuple[Array, ...]:
    """query, key, value, dout and, if there are any, the numbers of documents."""
    ids = () if case.documents is None else (case.documents,)
    return jax.device_put((*inputs_of(case, family), *ids))


def attention(name: str, case: Case, of: Pass) -> Attention:
    """The function that is timed under a name for a pass, under the case's mask."""
    if name in NAMED:
        return _ours(name, case, of)
    library = name.removesuffix("-deterministic")
    if library in ("xla", "cudnn"):
        return _peer(jax.nn.dot_product_attention, library, case)
    if library == "tokamax":
        tokamax = importlib.import_module("tokamax")
        return _peer(tokamax.dot_product_attention, "mosaic_gpu", case)

    def attend(query, key, value, *documents):
        ids = documents[0] if documents else None
        out = dot_product_attention(
            query,
            key,
            value,
            is_causal=case.is_causal,
            local_window_size=case.local_window,
            query_segment_ids=ids,
            key_value_segment_ids=ids,
            implementation=cast(Implementation, library),
        )
        return cast(Array, out)

    return attend


def _ours(name: str, case: Case, of: Pass) -> Attention:
    """Our kernels, with options or as `made_for` chooses, to be traced in the block of
    `target`; NotImplementedError for what they do not take."""
    # Imported on use: the kernels refuse a JAX that they do not know.
    from attn_jax.kernels import attention as kernels

    recipe = _recipe(name, case, of)
    if _wanted(recipe) not in (None, _backward_of(name, case)):
        raise NotImplementedError("the one-pass kernel does not take this problem")

    def attend(query, key, value, *documents):
        ids = documents[0] if documents else None
        rules = dataclasses.replace(
            case.rules, query_segment_ids=ids, key_value_segment_ids=ids
        )
        options = {"mask": rules, "recipe": recipe}
        return kernels.attention(query, key, value, scale=case.H**-0.5, **options)[0]

    return attend


def _wanted(recipe: Recipe | None) -> Literal["two_kernels", "fused"] | None:
    """The design that a recipe asks for where kernels are made now."""
    from attn_jax.kernels import architecture
    from attn_jax.kernels.options import of_recipe

    return of_recipe(recipe).design(None, architecture.chosen())


def target(name: str) -> contextlib.AbstractContextManager:
    """Where what is timed under a name is traced and compiled."""
    if name not in MADE_FOR:
        return contextlib.nullcontext()
    from attn_jax.kernels.architecture import made_for

    return made_for(MADE_FOR[name])


def _recipe(name: str, case: Case, of: Pass) -> Recipe | None:
    return recipe_of(
        name,
        dtype=case.dtype,
        head_dim=case.H,
        lengths=(case.T, case.S),
        pairs=case.B * case.K,
        group=case.N // case.K,
        mask=case.rules,
        differentiated=of != "forward",
    )


def _backward_of(name: str, case: Case) -> str:
    """The design that our kernels take under a name."""
    from attn_jax.kernels import architecture
    from attn_jax.kernels.attention import backward_of

    wanted = _wanted(_recipe(name, case, "backward"))
    query, value = (case.B, case.T, case.N, case.H), (case.B, case.S, case.K, case.H)
    chosen = architecture.chosen()
    return backward_of(query, value, chosen, case.rules, wanted=wanted)


def _peer(function: Callable[..., Any], implementation: str, case: Case) -> Attention:
    """A library's own function, called as its users do; not through our adapters."""

    def attend(query, key, value, *documents):
        ids = documents[0] if documents else None
        same = Mask(query_segment_ids=ids, key_value_segment_ids=ids)
        return function(
            query,
            key,
            value,
            mask=same.materialise(case.T, case.S),
            is_causal=case.is_causal,
            local_window_size=case.local_window,
            implementation=implementation,
        )

    return attend


def _build(name: str, case: Case, of: Pass, arrays: tuple[Array, ...]) -> timing.Arm:
    """Compiles a pass of an implementation and runs it twice."""
    logits = 4 * case.B * case.N * case.T * case.S
    if name in _WHOLE_ROWS and logits > _MOST_LOGITS:
        raise NotImplementedError(
            f"'{name}' keeps T x S logits, here {logits / 2**30:.0f} GiB of them"
        )
    with target(name):
        program, bind, seconds = _compiled(name, case, of, arrays)
        config = _config(name, case, of)
    arguments = bind(*arrays)
    found, again = program(*arguments), program(*arguments)
    columns: Row = {
        "compile_seconds": seconds,
        "same_bits": bool(same_bits(found, again)),
        "deterministic": IMPLEMENTATIONS[name],
        "config": config,
    }
    del again

    def fetched(found: dict[str, Array]) -> dict[str, np.ndarray]:
        return jax.device_get(
            {t: jnp.stack(pieces(case, t, found[t])) for t in TENSORS[of]}
        )

    results = {case.families[0]: fetched(found)}
    del found
    for family in case.families[1:]:
        results[family] = fetched(program(*bind(*_on_device(case, family))))
    time_of, description = _timer(program, arguments)
    return timing.Arm(time_of, columns | description, results)


def _compiled(
    name: str, case: Case, of: Pass, arrays: tuple[Array, ...]
) -> tuple[Any, Callable[..., tuple], float]:
    """A program, how its arguments are made of inputs, and the seconds to compile it.

    The backward pass is a program of its own, given what a forward pass has left for
    it, which is compiled and run here without being timed.
    """
    attend = attention(name, case, of)

    def forward(query, key, value, *ids):
        return {"out": attend(query, key, value, *ids)}

    def pulled(query, key, value, ids):
        return jax.vjp(lambda *x: attend(*x, *ids), query, key, value)

    def both(query, key, value, dout, *ids):
        out, pullback = pulled(query, key, value, ids)
        return {"out": out} | _named(pullback(dout))

    # How the pullback is put together again from its arrays, known once it is traced.
    structure: list[Any] = []

    def remembered(query, key, value, *ids):
        _, pullback = pulled(query, key, value, ids)
        leaves, tree = jax.tree.flatten(pullback)
        structure.append(tree)
        return leaves

    def backward(leaves, dout):
        return _named(jax.tree.unflatten(structure[0], leaves)(dout))

    def without_dout(query, key, value, dout, *ids):
        del dout
        return query, key, value, *ids

    if of == "both":
        return _compile(name, both, lambda *inputs: inputs, arrays)
    if of == "forward":
        return _compile(name, forward, without_dout, arrays)
    before, bind_before, _ = _compile(name, remembered, without_dout, arrays)

    def leaves_and_dout(*inputs):
        return before(*bind_before(*inputs)), inputs[3]

    return _compile(name, backward, leaves_and_dout, arrays)


def _named(gradients: Sequence[Array]) -> dict[str, Array]:
    return dict(zip(TENSORS["backward"], gradients, strict=True))


def _compile(
    name: str, function: Callable, bind: Callable[..., tuple], arrays: tuple[Array, ...]
) -> tuple[Any, Callable[..., tuple], float]:
    options = compiler_options(name)
    arguments = bind(*arrays)
    began = time.monotonic()
    program = jax.jit(function).lower(*arguments).compile(compiler_options=options)
    return program, bind, time.monotonic() - began


def compiler_options(name: str) -> dict[str, bool] | None:
    """What XLA is told under a name; the flag would be of the whole process."""
    if name.endswith("-deterministic"):
        return {"xla_gpu_deterministic_ops": True}
    return None


def _config(name: str, case: Case, of: Pass) -> str:
    """The tiling of our kernels; of others what is not the default of a library."""
    said = {
        "tokamax": ["mosaic_gpu, not autotuned"],
        "cudnn-deterministic": ["xla_gpu_deterministic_ops"],
    }.get(name, [])
    if case.mask == "packed" and name in PEERS:
        said.append("documents as an array of T x S")
    if name != "pallas" and name not in NAMED:
        return "; ".join(said)
    from attn_jax.kernels import architecture, design

    dims = case.H, case.H
    tilings = design.configuration_of(
        *(architecture.chosen(), *dims, case.S, case.rules), query_count=case.T
    )
    if of != "backward":
        said.append(f"forward {tilings.forward}")
    if of != "forward":
        if _backward_of(name, case) == "fused":
            said.append(f"backward in one pass, {tilings.backward_fused}")
        else:
            said.append(f"dq {tilings.backward_dq}")
            said.append(f"dkv {tilings.backward_dkv}")
    said += [f"{field} {value}" for field, value in OPTIONS.get(name, {}).items()]
    return "; ".join(said)


def _timer(program: Any, arguments: tuple) -> tuple[Callable[[int], float], Row]:
    """How a program is timed, and the columns that say so.

    On a GPU its kernels by CUPTI: their own times added up, without the gaps between
    them. Where CUPTI does not answer, and on a CPU, from call to result.
    """
    how = "wall clock"
    if jax.default_backend() == "gpu":
        try:
            _, kernels = device_time(program, arguments, timing.RUNS)
        except (ImportError, RuntimeError) as error:
            how = f"wall clock (CUPTI: {timing.reason(error)})"
        else:
            longest, _ = max(kernels, key=lambda kernel: kernel[1])
            said = {"kernel": longest, "kernels": len(kernels), "timer": "CUPTI"}
            return (lambda runs: device_time(program, arguments, runs)[0]), said
    return functools.partial(_wall_clock, program, arguments), {"timer": how}


def memory_of(program: Any) -> Row:
    """What a compiled program holds, in MiB: `megabytes`, arguments and results
    included, and `beside` them what XLA allocates between."""
    memory = program.memory_analysis()
    assert memory is not None  # Every backend that JAX ships with reports it.
    beside = memory.temp_size_in_bytes
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes + beside
    return {"megabytes": held / 2**20, "beside": beside / 2**20}


def _wall_clock(program: Any, arguments: tuple, runs: int) -> float:
    began = time.perf_counter()
    for _ in range(runs):
        jax.block_until_ready(program(*arguments))
    return 1e3 * (time.perf_counter() - began) / runs
