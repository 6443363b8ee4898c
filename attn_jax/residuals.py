"""Names of attention's results, for the policies of `jax.checkpoint`."""

import jax
from jax.ad_checkpoint import checkpoint_name

OUT_NAME = "attn_jax_out"
LSE_NAME = "attn_jax_lse"


def named_out(out: jax.Array) -> jax.Array:
    """`out`, or what else of it the backward pass reads, under its name.

    In a `jax.custom_vjp` the forward rule names what it keeps and what it returns: a
    name that is given to the result later is another value's, and a policy that saves
    that one would run the forward pass again for the residuals.
    """
    return checkpoint_name(out, OUT_NAME)


def named_lse(lse: jax.Array) -> jax.Array:
    return checkpoint_name(lse, LSE_NAME)
