"""tokamax's Mosaic GPU attention under jax_enable_x64; a Hopper GPU is needed."""

import importlib.metadata

import jax
import jax.numpy as jnp
import tokamax

jax.config.update("jax_enable_x64", True)
q = jnp.ones((1, 512, 4, 64), jnp.bfloat16)
version = importlib.metadata.version("tokamax")
print(f"jax {jax.__version__}, tokamax {version}")
print(tokamax.dot_product_attention(q, q, q, implementation="mosaic_gpu").shape)
