"""Whether what a target raises is a refusal of what it was asked for, or a fault."""

import jax

from attn_jax.audit.measure import is_out_of_memory
from attn_jax.audit.raised import names_an_argument, text_of

# Changes of `invariance` that call the target inside a transformation of JAX.
LAYERS, MAPPING = "layers", "mapping"


def refuses_arguments(error: Exception) -> bool:
    """Whether it says that the target does not take what it was given, however much
    memory there is: so do its own problems."""
    refuses = isinstance(error, NotImplementedError | ValueError)
    return refuses or names_an_argument(error)


def is_refusal(error: Exception) -> bool:
    """Whether it says that the target has nothing for this: no fault of its.

    NotImplementedError, ValueError, or an argument that the function does not have; and
    where memory does not hold it nothing is known. Where a problem has the same for a
    fault, it is one here, too (`verdict.together`).
    """
    if refuses_arguments(error):
        return True
    return isinstance(error, MemoryError) or is_out_of_memory(error)


def is_excused(name: str, error: Exception) -> bool:
    """Whether what a part or change `name` makes the target raise is no fault of its: a
    refusal, or that a transformation cannot be had.

    Whoever maps a function sees at once that it cannot be. In a loop over layers that
    is a function that holds arrays of its caller's trace where JAX can take none, as
    `jax.custom_vjp` cannot: a limit, and never a wrong number. Another error there is
    one of the function.
    """
    if is_refusal(error) or name == MAPPING:
        return True
    return name == LAYERS and _is_of_tracers(error)


def _is_of_tracers(error: Exception) -> bool:
    kinds = jax.errors.JAXTypeError, jax.errors.JAXIndexError
    # While a program is lowered, JAX 0.11.2 has no error of its own for it.
    return isinstance(error, kinds) or (
        isinstance(error, TypeError) and "Tracer" in text_of(error)
    )
