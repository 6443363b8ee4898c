"""Pallas (Mosaic GPU) kernels. Importing them checks the version of JAX."""

import jax

KNOWN_JAX_VERSIONS = ("0.11.2", "0.12.0.1")


def check_jax_version() -> None:
    """Raises ImportError on a JAX that the kernels were never compiled with.

    Mosaic GPU is experimental: names, defaults and generated code differ between
    releases, so that an unknown one may compile to something wrong or slow.
    """
    if jax.__version__ not in KNOWN_JAX_VERSIONS:
        raise ImportError(
            f"attn_jax's kernels work with jax {' and '.join(KNOWN_JAX_VERSIONS)}, not "
            f"{jax.__version__}: install one of these, or use "
            "implementation='emulated' or 'xla'"
        )


# Before any module here reaches for what another version may not have.
check_jax_version()
