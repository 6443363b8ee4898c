"""How libraries round the attention of several devices.

`LIBRARIES` has one of each class, by what is kept in 16 bits between devices:

    attn_jax         nothing: FP32 parts, sums and gradients on their way, and m, l and
                     A go on from part to part (`context_parallel`'s default). (So do
                     MagiAttention with its two FP32 switches and an open change of
                     FlashAttention-3; kvax for dK and dV)
    flash2           nothing either, on parts of FlashAttention-2, which the others
                     below have: its delta is from the rounded O
    ring_flash_attn  the parts: ring-flash-attention, USP, PyTorch's context
                     parallelism, tokamax and MaxText; TransformerEngine for JAX in the
                     forward pass
    issue_42         its issue #42's own way out: all-gather forward, ring backward
    llama3           its llama3 variant, and TransformerEngine's all-gather: dK and dV
                     of devices summed in 16 bits by the reduce-scatter
    te_ring          the sums: TransformerEngine for PyTorch, point to point

`RINGS` has these and

    lucidrains       the weighted sum A on its way from part to part, and dK and dV:
                     ring-attention-pytorch, commit 373f75b. Its kernel rounds parts of
                     dK and dV, too, which here are not (`partials` would round dQ's).
                     One device is FlashAttention-2, where its own rounds A once

What `attn_jax` takes delta from is O and a byte, as on one device, where
`context_parallel`'s default has O in FP32.
"""

import dataclasses
from typing import Any

from jaxtyping import Array, Float

from attn_jax import context_parallel
from attn_jax.context_parallel import Layout
from attn_jax.context_parallel.arguments import Strategy, Width
from attn_jax.formats import BF16, NumberFormat
from attn_jax.recipe import RECIPES, Recipe
from attn_jax.recipe_schema import Step


@dataclasses.dataclass(frozen=True)
class Variant:
    """How devices work together: arguments of `context_parallel.simulate`.

    Attributes:
      ulysses: devices that deal out heads under `ring+ulysses`; of one device, none.
    """

    recipe: Recipe
    strategy: Strategy = "ring"
    partials: Width = "fp32"
    wire: Width = "fp32"
    ulysses: int = 2


def of_parts(name: str) -> Recipe:
    """A named recipe, with m, l and A carried on from part to part if it is one of our
    kernels, as `context_parallel` does by default."""
    recipe = RECIPES[name]
    if not name.startswith("attn_jax"):
        return recipe
    return dataclasses.replace(recipe, ring_merge="carry_whole")


_LUCIDRAINS = dataclasses.replace(
    RECIPES["flash2"], ring_merge="carry", ring_accumulator=Step(BF16)
)
LIBRARIES = {
    "attn_jax": Variant(of_parts("attn_jax")),
    "flash2": Variant(RECIPES["flash2"]),
    "ring_flash_attn": Variant(RECIPES["ring_flash_attn"]),
    "issue_42": Variant(RECIPES["ring_flash_attn"], "all_gather+ring"),
    "llama3": Variant(RECIPES["flash2"], "all_gather", "16-bit", "16-bit"),
    "te_ring": Variant(RECIPES["te_ring"]),
}
RINGS = LIBRARIES | {"lucidrains": Variant(_LUCIDRAINS, wire="16-bit")}


def simulated(
    variant: Variant,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K D"],
    *,
    shards: int,
    layout: Layout = "zigzag",
    out_dtype: Any = None,
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """Causal attention on `shards` devices, (out, LSE), emulated on one.

    Rounds as the variant says. Raises as `context_parallel.simulate`.
    """
    return context_parallel.simulate(
        *(query, key, value),
        shards=shards,
        layout=layout,
        is_causal=True,
        strategy=variant.strategy,
        ulysses=1 if shards == 1 else variant.ulysses,
        recipe=variant.recipe,
        partials=variant.partials,
        wire=variant.wire,
        out_dtype=out_dtype,
    )


def with_inputs_as_they_are(variant: Variant, inputs: NumberFormat) -> Variant:
    """The same roundings but for those of Q, K, V and dO, which have format `inputs`.

    What `partials` and `wire` keep in 16 bits is still kept in them, by the recipe's
    own fields. That rounds once more in `llama3`: what a device adds up of dK and dV,
    of its two runs of queries in a zigzag, before it sends them.
    """
    recipe, changes = variant.recipe, {}
    narrow = Step(recipe.inputs)
    if variant.partials == "16-bit":
        changes |= {"ring_partial": narrow, "ring_gradient_partial": narrow}
    if variant.wire == "16-bit":
        changes["ring_gradient_accumulator"] = narrow
    recipe = dataclasses.replace(recipe, inputs=inputs, **changes)
    return dataclasses.replace(variant, recipe=recipe, partials="fp32", wire="fp32")
