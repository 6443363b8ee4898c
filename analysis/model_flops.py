"""Floating-point operations of the model's matrix products."""

from train.config import Config, image_tokens

# Dense BF16 products of a card, without sparsity, in FLOP/s: its data sheet's.
PEAKS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H200": 989.4e12,
}
# Widths of the sine features of a time, and parts of the modulation of a block and of
# the output (`train.model`).
_TIME_FEATURES, _BLOCK_PARTS, _FINAL_PARTS = 256, 6, 2
# A backward pass has two products for each of the forward pass.
PER_STEP = 3


def forward_flops(config: Config, vocabulary: int) -> int:
    """Of one image through the network: two for each multiplication of a product.

    With L tokens, width d and hidden width h, a block has 2 L (4 d^2 + 2 d h) for its
    weights and 4 L^2 d for attention, Q K^T and P V, all of it, as there is no mask.
    Beside them the products that embed text, patches and times and that modulate.
    Nothing is counted that is done again, by a kernel or by `remat`.
    """
    model, d = config.model, config.model.width
    patches, pixels = image_tokens(config), 3 * model.patch**2
    length = model.text_length + patches
    block = length * (4 * d * d + 2 * d * model.mlp_ratio * d) + 2 * length**2 * d
    ends = model.text_length * vocabulary * d + 2 * patches * pixels * d
    time = _TIME_FEATURES * d + d * d + (_BLOCK_PARTS + _FINAL_PARTS) * d * d
    return 2 * (model.depth * block + ends + time)
