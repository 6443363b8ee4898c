"""Runs emulator and oracle on the same inputs and compares what they return."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np

from attn_jax import emulator
from attn_jax.mask import Mask
from tests import numpy_oracle
from tests.enclosure import Arithmetic, Interval
from tests.oracle_inputs import EXACT, LN2, exact_dlse, powers_of_two

FIELDS = numpy_oracle.Result._fields


@functools.partial(jax.jit, static_argnums=(0, 1))
def emulated(recipe, scale, mask, rounding_key, query, key, value, dout, dlse):
    def attend(query, key, value):
        return emulator.attention(
            query,
            key,
            value,
            recipe=recipe,
            mask=mask,
            scale=scale,
            rounding_key=rounding_key,
        )

    (out, lse), vjp = jax.vjp(attend, query, key, value)
    return out, lse, *vjp((dout, dlse))


class Outcome:
    """Emulator and oracle on the same inputs, by field of `numpy_oracle.Result`."""

    def __init__(
        self, recipe, inputs, dlse=None, *, mask=Mask(), scale=None, jit=True, key=None
    ):
        dtype = Arithmetic(recipe.carrier).dtype
        B, T, N, _ = inputs.query.shape
        arrays = [np.asarray(x).astype(dtype) for x in inputs]
        dlse = np.zeros((B, N, T), dtype) if dlse is None else dlse.astype(dtype)
        with contextlib.nullcontext() if jit else jax.disable_jit():
            results = emulated(
                recipe, scale, mask, key, *map(jnp.asarray, (*arrays, dlse))
            )
        self.got = dict(zip(FIELDS, (np.asarray(x, np.float64) for x in results)))
        options = {"recipe": recipe, "mask": mask, "scale": scale}
        self._oracle = functools.partial(
            numpy_oracle.attention, *arrays, dlse, **options
        )

    @functools.cached_property
    def want(self) -> dict[str, Interval]:
        """Made when asked for: some ask for what the emulator has alone."""
        return self._oracle()._asdict()

    def inside(self, field: str) -> np.ndarray:
        got, want = self.got[field], self.want[field]
        same_nan = np.isnan(got) & np.isnan(want.lo) & np.isnan(want.hi)
        return ((want.lo <= got) & (got <= want.hi)) | same_nan

    def pinned(self, field: str) -> float:
        """The share of entries that the oracle allows one value only."""
        return float(self.want[field].is_point.mean())

    def check(self, fields=FIELDS) -> None:
        for field in fields:
            outside = ~self.inside(field)
            if outside.any():
                at = tuple(int(i) for i in np.argwhere(outside)[0])
                want = self.want[field].at(*at)
                raise AssertionError(
                    f"{field}: {outside.sum()} of {outside.size} outside, first {at}: "
                    f"{self.got[field][at]!r} not in [{want.lo!r}, {want.hi!r}]"
                )

    def check_bits(self, fields) -> None:
        """Every entry pinned, so `check` compares bits (but for the sign of zero)."""
        self.check(fields)
        pinned = {field: self.pinned(field) for field in fields}
        assert set(pinned.values()) == {1.0}, pinned


def all_in(x, interval: Interval) -> bool:
    return bool(((interval.lo <= x) & (x <= interval.hi)).all())


def check_exact_arithmetic(jit: bool) -> None:
    outcome = Outcome(EXACT, powers_of_two(), exact_dlse(), scale=LN2, jit=jit)
    outcome.check_bits(FIELDS)
    assert all(np.ptp(outcome.got[field]) > 0 for field in FIELDS if field != "lse")
