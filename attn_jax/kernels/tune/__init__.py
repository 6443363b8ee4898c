"""`python -m attn_jax.kernels.tune`: measures tilings and writes the table of them."""
