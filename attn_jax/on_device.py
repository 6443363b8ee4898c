"""Whether the default device runs kernels of ours, found out when it is asked."""


def lacks_kernels(needs: str, instead: str) -> str | None:
    """Why the default device has none of our kernels, in one line that says what they
    need and what to use instead; None if it has some."""
    try:  # Imported on use: a JAX that the kernels do not know is no harm to the rest.
        from attn_jax.kernels import architecture
    except ImportError as error:
        return str(error)
    device = architecture.default_device()
    if architecture.of_device(device) is not None:
        return None
    return f"'pallas' needs {needs}, and this is {device.device_kind}; use {instead}"
