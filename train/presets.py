"""Named configurations, from a CPU demonstration to several GPUs.

Tokens are image patches plus text: tiny 28, small 320, small-long and base 1088,
base-long 4160, large 1152. The head dim is 64 throughout.
"""

import dataclasses

from train.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimizerConfig,
)

# fp32 compute with bf16 attention inputs: a CPU has no fast 16-bit arithmetic, and
# the 16-bit inputs are what the kernels, and their emulated recipe, take.
_TINY = Config(
    preset="tiny",
    precision="fp32",
    attention_inputs="bf16",
    steps=4000,
    batch_size=32,
    lr=2e-3,
    data=DataConfig(family="pos", resolution=32),
    model=ModelConfig(
        width=128, depth=4, heads=2, patch=8, tokenizer="word", text_length=12
    ),
    optimizer=OptimizerConfig(warmup=100),
    eval=EvalConfig(novel=250),
)
# bf16 compute over fp32 weights, so bf16 attention inputs, for every preset below.
_SMALL = Config(
    preset="small",
    precision="bf16",
    steps=20_000,
    batch_size=128,
    lr=7e-4,
    time_mean=1.2,
    time_std=1.2,
    data=DataConfig(workers=4),
    eval=EvalConfig(every=5000, batch_size=500),
    checkpoint=CheckpointConfig(every=5000),
)
_SMALL_LONG = dataclasses.replace(
    _SMALL,
    preset="small-long",
    model=dataclasses.replace(_SMALL.model, patch=2),
    eval=dataclasses.replace(_SMALL.eval, batch_size=250),
)
_BASE = dataclasses.replace(
    _SMALL,
    preset="base",
    steps=50_000,
    lr=3e-4,
    data=dataclasses.replace(_SMALL.data, resolution=128),
    model=ModelConfig(width=768, depth=12, heads=12),
    optimizer=OptimizerConfig(warmup=1000, ema=0.9999),
    eval=dataclasses.replace(_SMALL.eval, batch_size=100),
)
_BASE_LONG = dataclasses.replace(
    _BASE,
    preset="base-long",
    batch_size=16,
    data=dataclasses.replace(_BASE.data, resolution=256),
    eval=dataclasses.replace(_BASE.eval, batch_size=10),
)
_LARGE = dataclasses.replace(
    _BASE,
    preset="large",
    steps=100_000,
    lr=1e-4,
    data=dataclasses.replace(_BASE.data, resolution=256),
    model=ModelConfig(
        width=1152, depth=28, heads=18, patch=8, text_length=128, remat=True
    ),
)
PRESETS: dict[str, Config] = {
    preset.preset: preset
    for preset in (_TINY, _SMALL, _SMALL_LONG, _BASE, _BASE_LONG, _LARGE)
}
