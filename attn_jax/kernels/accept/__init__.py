"""`python -m attn_jax.kernels.accept`: are the kernels right on this card, how fast?"""
