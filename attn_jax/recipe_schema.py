"""What a recipe holds: an attention algorithm as data, with the format of every step.

A recipe is to the emulator what a tableau is to a Runge-Kutta solver.
"""

import dataclasses
import math
import numbers
from typing import Any, Literal, get_args

from attn_jax.formats import BF16, FP32, FP64, NumberFormat, Rounding


@dataclasses.dataclass(frozen=True)
class Step:
    """The format in which the result of a step is kept, and how it gets there."""

    format: NumberFormat
    rounding: Rounding = Rounding.NEAREST_EVEN

    def __post_init__(self):
        if not (
            isinstance(self.format, NumberFormat)
            and isinstance(self.rounding, Rounding)
        ):
            raise ValueError(
                "Step takes a NumberFormat and a Rounding, such as Step(BF16), got "
                f"{self.format!r} and {self.rounding!r}"
            )


_BF16 = Step(BF16)
_FP32 = Step(FP32)
# Of r and w: beyond it they and what they scale would leave an FP32 carrier.
MOST_HEAD_EXPONENT = 100


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What an attention kernel computes, step by step, forward and backward.

    Hashable, so it can be a static argument of `jax.jit`. This text is the definition:
    the emulator runs it, and whoever follows it gets the emulator's bits, up to the
    freedoms named below.

    NOTATION. `f(y)`, with f the name of a `Step` field, is y rounded once as that field
    says; a step whose format is the carrier's rounds nothing. All else is arithmetic of
    the carrier, each operation rounded once. E(y) = e^y and u = 1 for exponential
    'exp'; else E(y) = 2^y and u = log2(e), so that logits x, row maxima m and shifts
    are in units of log2. E(-inf) = 0. [i:j] is a block of keys.
    FREE are the order of additions inside one chunk of a sum, whether a product and the
    addition next to it round once or twice, and the last ulp or two of E, log, tanh and
    division (XLA on a CPU divides rows by way of a rounded reciprocal); and two things
    below that are found from sums, where these lie within their own roundings of what
    decides: r, by a factor of two, and c, the next multiple or 0.
    A chunk is the whole sum unless `dot_chunk` says otherwise.

    SUMS. dot(a, b) and rowsum(a) mean: t = 0; for each run of `dot_chunk` products, in
    order, t = dot_accumulator(t + sum of the run), where None is one run for all; the
    last run may be shorter. rowsum, which no matrix unit makes, has rowsum_accumulator
    instead. They are used where written below and nowhere else.
    With dot_alignment F, dot adds as matrix units do: t and the products of a run are
    cut off toward zero to multiples of 2^(z - F) and then added, exactly. z is the
    largest of exponent(t) and of exponent(a) + exponent(b) over the run's products a b;
    zeros are left out. exponent(y) is floor(log2|y|), but at least that of the least
    normal number of y's format: for t dot_accumulator's, for a and b that of the step
    or of `inputs` that rounded them (of F over w for the K' that has a w, below).

    INPUTS. Q, K, V and dO are rounded to `inputs`, to nearest; wider arrays may come.
    With a scaled_query the query is scaled before its product: below, Q stands for
        Q' = scaled_query(Q scale), made once for both passes,
    and scale for 1. At the very end, of dQ as it is below before `gradient` rounds it,
        dQ = gradient(scaled_query(dQ) scale),
    as differentiating Q' has it: the gradient of Q' is of the type that Q' is of.

    LOGITS of a tile (all queries, or a block of them, by a block of keys):
        s = logits(dot(Q, K^T)), summed over H
        scale_at 'exponent', no bias, no soft cap:  x = s (scale u), one number
        otherwise:  x = logits(s scale);  with a bias x = logits(x + bias);  with a soft
                    cap x = logits(cap tanh(x / cap));  with u != 1 x = logits(x u)
        x = -inf where the mask hides a key.

    FORWARD. At first m = -inf, l = 0, A = 0; with a sink m = sink u and
    l = probability_scale. Then for each block of `block_kv` keys, in `kv_order`:
        r  = the row's largest x in the block. With repeated_max_factor, if more than
             one visible key has x = r:  r = factor r if r > 0, r = 0 if r < 0
        m' = row_max(max(m, r));  but m' = m where m' - m <= rescale_threshold log2
             units.  Where m' = -inf the next lines take 0 for it (all of P is 0)
        e  = exponentiated(E(shifted(x - m')))
        P  = e probability_scale
        c  = correction(E(correction(m - m')))
        p  = probability(P)
        l' = row_sum(row_sum(c l) + row_sum(rowsum(P))), p for P if row_sum_of='rounded'
        normalise 'once':       A' = accumulator(accumulator(c A) + product(dot(p, V)))
        'each_step':            A' = accumulator(accumulator(accumulator(accumulator(
                                     l c) A) + product(dot(p, V))) / l')
        'before_product':       A' = product(dot(probability(P / l'), V)) (one block)
    At the end O = A / l for 'once', A otherwise, LSE = lse(m / u + log(l /
    probability_scale)), and output(O) is returned; asked for in 32 or 64 bits, O is
    returned as it is. Divisions by l = 0 divide by 1: O = 0 where nothing is seen.
    E in e is the polynomial for 'exp2_polynomial'; in c and for a sink it is exact.
    Where probability is FP16 and inputs are BF16, kernels have V as FP16 numbers, times
    one power of two for a head: exact down to 2^-31 of its largest. Here V is V.

    BACKWARD, dO rounded like an input and dLSE not:
        x = as in the forward pass, from the same roundings
        P = E(shifted(x - lse(LSE u))) (0 for LSE = -inf), by the polynomial if there
            is one, for probability_from 'lse'; for 'softmax' P / l' of the forward
            pass's lines with the whole row as one block
        delta = delta(rowsum(dO O)), summed over H, with the O of `delta_source`:
            'o' as returned, 'o_f32' unrounded, 'o_hi_lo' output(O) + output(O -
            output(O)), 'o_hi_lo8' output(O) and a byte, see below; 'p_dp':
            delta(sum over blocks of rowsum(softmax_probability(P) dP)), in a pass over
            the keys before all else
    'o_hi_lo8' counts numbers of the carrier, of c bits behind the leading one, with u =
    2^(c - m - 8), or 1, for the m of output's format: a 256th of those from one number
    of that format to the next. O is the q-th of u from output(O) on, away from 0; q is
    rounded, halves up, and -128 or 127 where it lies beyond. It stands for the number
    q u from output(O). NaN where O or output(O) is not finite.
    Then, tile by tile, key blocks of `backward_block_kv` outside and in order, query
    blocks of `backward_block_q` inside and in order:
        dP = dprobability(dot(dO, V^T)), summed over H
        D  = softmax_probability(P) (dP - (delta - dLSE)), times a cap's 1 - tanh^2
        dS = dlogits(D f), f = dlogits_scale, times scale for gradient_scale_at 'logits'
        dV = dv_accumulator(dV + dot(backward_probability(P)^T, dO))
        dK = dk_accumulator(dK + dot(dS^T, Q))
        dQ = dq_accumulator(dQ + dot(dS, K)), with dS' for dS if there is dq_dlogits,
            K' for K if dq_centre is 'keys'
        dbias += D summed over its broadcast axes, unrounded
    dot over queries runs over (query head of the group, query), heads slowest. If
    dot_accumulator, dk_accumulator and dv_accumulator are the carrier's format, and
    dot_alignment is None, query blocks cannot matter and the emulator takes all queries
    at once. At the end, with
    g = scale / dlogits_scale, or 1 / dlogits_scale for gradient_scale_at 'logits':
        dQ = gradient((dQ - (sum of dS over the row - its exact value) centre) g)
        dK = gradient(dK g)         dV = gradient(dV)
    With a group_gradient each query head n of the group sums a dK_n and dV_n of its own
    tile by tile, by the lines of dK and dV with dot over its queries alone, and
        dK = gradient(sum over n of group_gradient(dK_n g))
        dV = gradient(sum over n of group_gradient(dV_n))
    with the sums over n in order, in the carrier; with a group_accumulator from 0, and
    each of the sums so far rounded by it.
    The centre is 0 for dq_centre 'none'; for 'mean' the mean of the keys that any query
    of the same block of `backward_block_q` sees (under a dense mask or segment ids of
    those that the row itself sees: `emulator.attention`); or, for 'row', the row's own
    sum_j P_ij K_j, made in the forward pass as O before `output` is, with K for V.
    In exact arithmetic it subtracts 0: a row of dS sums to dLSE, less a sink's share,
        z = f (dLSE + E(sink u - LSE u) (delta - dLSE)), without sinks f dLSE, and 0
            for LSE = -inf
    The mean does not help where a row's weight lies on few keys, far from their mean.
    For dq_centre 'keys' a centre comes off the keys before, no row of dS is summed, and
        K' = inputs(K - c)          dQ = gradient((dQ + z c) g)
    with one c for a key head: of all its keys, be they hidden or on another device, and
    in FP32 whatever the carrier. By columns, with sums over the keys in any order,
        mean = sum of K / S, square = sum of K K / S
        c = 0 unless 17 mean mean > square; else the multiple of 2^p next to mean, the
            even one of two equally near
        p = 1 + t - m for sqrt(square) = y 2^t, 1/2 <= y < 1, and the m bits that
            `inputs` stores (7 for BF16); from -100 to 100
        c = 0, too, where 4 |K| exceeds the largest number of `inputs`, or sums overflow
    Any c gives the same dQ in exact arithmetic, and one of so few digits leaves most
    K - c exact. It helps as the mean of all keys does, no more. K' is nowhere but in
    dot(dS, K'): logits, dK and the forward pass have K.
    A soft cap breaks the identity, so under one there is no centre: it is 0 and K' = K.
    dS' = dq_dlogits(D f r) stands in for dS in dQ and in the sum of dS over the row,
    both of which are divided by r in the end (of each hop); dK has dS. r = 1 if the
    format of dq_dlogits has FP32's exponents, 8 bits or more. Else r is a power of two
    for each key head of a batch entry that brings a bound of all its dS into range,
    since |D| <= |dP| + |delta| + |dLSE|: with Euclidean norms over H
        b = max of |f| (2 |dO| v + |dLSE|) over all queries of the query heads that
            share the key head, be they on another device, whose dO and dLSE are finite;
            dLSE = 0 for LSE = -inf
        v = the norm of (max_j |V_j1|, ..., max_j |V_jH|), maxima of the columns over
            all keys of the head, be they hidden or on another device, so that one
            reading of V finds it
        r = 2^(e - x) for b = y 2^x, 1/2 <= y < 1, and 2^e <= the largest number of the
            format < 2^(e+1); from 2^-100 to 2^100, and 1 for b = 0
    So |D f r| <= 2^e but for roundings, half of what overflows, and for FP16 (e = 15)
    what is below 2^-29 b is subnormal and loses bits: rows of dS whose dO is far below
    the head's largest lose them first. Kernels fold r into the exponent,
    E(x - (LSE u - log2 r)), of the P that dV and dK have, too, which is why a head has
    one r; and they have K as FP16 numbers scaled by one power of two for a head: exact
    down to 2^-31 of its largest. Here K is what it is for other products.
    Where dS is scaled, K' is in the format F of dq_dlogits, too, rounded to nearest:
        K' = F((K - c) w) / w
        w = 2^(e - x) for 2 max |K| = y 2^x, 1/2 <= y < 1, the maximum over all keys and
            columns of the key head; from 2^-100 to 2^100, and 1 for K = 0
    From BF16 keys to FP16, three bits more, it is exact almost always.
    With dq_sum 'integers' there is no dq_accumulator: in units of 1 / (w r) dQ is
        n = n + the whole number next to w dot(dS', K'), the even one of two equally
            near, for each block of keys (of a hop, from 0), and dQ = n / (w r)
    in the end, n as a number of the carrier. 32 bits hold n, which is at most 2^30 but
    for roundings, as w |K'| <= 2^15 and |dS'| sums to at most 2^15 over a row; so n is
    the same in any order of the blocks. (If P sums to 1, as it need not with an `lse`
    of few bits: there n may be cut off or wrap round.) What they cannot hold makes dQ
    NaN: a row whose delta is infinite or NaN, and a head whose b or largest |K| is, or
    is so large that r or w is 2^-100. Not under a soft cap, where K' has no w: there
    the sum is that of 'numbers'.
    The gradient of a sink is -sum of E(sink u - LSE u) (delta - dLSE), unrounded.

    A RING of `ring_size` W > 1 devices: T and S are cut into W equal shares in order;
    device r keeps queries r and at hop h = 0 .. W-1 meets keys c = (r - h) mod W; in
    the backward pass, too, with its own keys at hop 0, or at hop W if `ring_own_keys`
    is 'last', and dQ, dK and dV are summed in that order. Blocks are cut within shares.
    For ring_merge 'lse', 'sigmoid' and 'two_pass' a hop runs the whole forward pass on
    its share (the sink in hop 0 alone) and hands over O_h = ring_partial(O) and LSE_h;
    w(y) = e^y, s(y) = 1 / (1 + e^-y):
        'lse'       L' = lse(max + log1p(w(min - max))) of L and LSE_h,
                    O = ring_accumulator(w(L - L') O + w(LSE_h - L') O_h)
        'sigmoid'   O = ring_accumulator(O - s(LSE_h - L) (O - O_h)),
                    L' = lse(L - log s(L - LSE_h))
        'two_pass'  first the L of 'lse' over all hops; then
                    O = ring_accumulator(O + w(LSE_h - L) O_h), from O = 0
        'carry'     no merge: m, l and A go on from hop to hop, and A =
                    ring_accumulator(A) after each hop; ring_partial is not used
        'carry_whole'  with a hop's own M, l_h, A_h, n the (even) whole number next to M
                    and m' = max(m, n): l' = 2^(m-m') l + 2^(n-m') (E(M-n) l_h), of A
                    in the same way, then as in 'carry'; u = log2(e), normalise 'once'
    In 'lse' and 'sigmoid' the first hop that sees a key gives, unmerged, L = LSE_h and
    O = ring_accumulator(O_h); one that sees none changes nothing. In 'two_pass' such a
    hop has weight 0.
    Backward, with the merged LSE and delta from the merged O, each hop sums dQ, dK and
    dV over its tiles as above from 0, and for each of them
        total = ring_gradient_accumulator(total + ring_gradient_partial(hop's sum g))
    (g = 1 for dV); with a group_gradient a hop's sum g of dK, or of dV, is the sum over
    n of what that step rounds. The centre is subtracted, or (z c) g added, and
    `gradient` rounds, at the end.
    ring_size 1 is the plain algorithm and uses no ring field.

    STOCHASTIC steps need a key: each place above where a field's name stands draws bits
    of its own, from the key, the place, the tile, the hop and the pass (forward, the
    pass for 'p_dp', backward), so P made again in the backward pass is rounded afresh.
    'two_pass' draws the same bits in both passes.

    Further fields:
      carrier             FP32, or FP64 (needs x64)
      block_q, block_kv   tile sizes, clamped to the length; None is the whole length.
                          block_q and loop_order change no bit of the forward pass
      scaled_query        None: Q is used as it came and its logits are scaled. With
                          one, scale_at is about u alone: whether `logits` rounds x u
      exp2_degree         2 to 5; polynomials in `emulator.exponential`
      repeated_max_factor Qiu & Yao's fix; None for none. As in their paper equal means
                          equal. A large factor r makes e underflow: all of a row where
                          (factor - 1) r exceeds 87 (natural units, FP32). x = -inf
                          is no maximum, be its key hidden or only its bias -inf: a
                          block that has nothing else keeps r = -inf
      dq_dlogits          None: dQ, too, has dS as `dlogits` rounds it
      dlogits_scale       a power of two
      group_gradient      None: dK and dV of a key head are one sum over all query heads
                          of its group. Backward passes that have a key head for each
                          query head, and add them up afterwards, round each
      group_accumulator   None: their sum is the carrier's. It is in 16 bits where a
                          compiler adds up 16-bit numbers as such, as XLA does on a CPU.
                          Without a group_gradient it is not used
    """

    name: str
    source: str
    inputs: NumberFormat = BF16
    carrier: NumberFormat = FP32
    dot_accumulator: Step = _FP32
    dot_chunk: int | None = None
    dot_alignment: int | None = None
    rowsum_accumulator: Step = _FP32
    block_q: int | None = 64
    block_kv: int | None = 64
    loop_order: Literal["q_outer", "kv_outer"] = "q_outer"
    kv_order: Literal["forward", "reverse"] = "forward"
    scaled_query: Step | None = None
    scale_at: Literal["logits", "exponent"] = "logits"
    exponential: Literal["exp", "exp2", "exp2_polynomial"] = "exp"
    exp2_degree: int | None = None
    normalise: Literal["once", "each_step", "before_product"] = "once"
    row_sum_of: Literal["unrounded", "rounded"] = "unrounded"
    rescale_threshold: float = 0.0
    repeated_max_factor: float | None = None
    logits: Step = _FP32
    shifted: Step = _FP32
    row_max: Step = _FP32
    row_sum: Step = _FP32
    correction: Step = _FP32
    exponentiated: Step = _FP32
    probability: Step = _BF16
    probability_scale: float = 1.0
    product: Step = _FP32
    accumulator: Step = _FP32
    output: Step = _BF16
    lse: Step = _FP32
    backward_block_q: int | None = 64
    backward_block_kv: int | None = 64
    probability_from: Literal["lse", "softmax"] = "lse"
    softmax_probability: Step = _FP32
    backward_probability: Step = _BF16
    delta_source: Literal["o", "o_hi_lo", "o_hi_lo8", "o_f32", "p_dp"] = "o"
    delta: Step = _FP32
    dprobability: Step = _FP32
    dlogits: Step = _BF16
    dq_dlogits: Step | None = None
    dlogits_scale: float = 1.0
    gradient_scale_at: Literal["logits", "epilogue"] = "epilogue"
    dq_centre: Literal["none", "mean", "row", "keys"] = "none"
    dq_accumulator: Step = _FP32
    dq_sum: Literal["numbers", "integers"] = "numbers"
    dk_accumulator: Step = _FP32
    dv_accumulator: Step = _FP32
    group_gradient: Step | None = None
    group_accumulator: Step | None = None
    gradient: Step = _BF16
    ring_size: int = 1
    ring_merge: Literal["lse", "sigmoid", "two_pass", "carry", "carry_whole"] = "lse"
    ring_partial: Step = _FP32
    ring_accumulator: Step = _FP32
    ring_gradient_partial: Step = _FP32
    ring_gradient_accumulator: Step = _FP32
    ring_own_keys: Literal["first", "last"] = "first"

    def __post_init__(self):
        for field in dataclasses.fields(self):
            given = getattr(self, field.name)
            value = _as_python(field, given)
            fault = _fault(field, value)
            if fault is not None:
                raise ValueError(f"{field.name} must be {fault}, got {given!r}")
            object.__setattr__(self, field.name, value)
        _check_constants(self)
        _check_minus_infinity(self)
        # Addends below 2^(z + 2), multiples of 2^(z - F): their sums fit 53 bits.
        if self.dot_alignment is not None and not (
            self.carrier == FP64
            and self.dot_chunk is not None
            and self.dot_chunk <= 2 ** (50 - self.dot_alignment)
        ):
            raise ValueError(
                "dot_alignment needs sums that are exact: set carrier=FP64, and "
                "dot_chunk to at most 2**(50 - dot_alignment)"
            )
        if self.normalise == "before_product" and self.block_kv is not None:
            raise ValueError(
                "normalise='before_product' needs the whole row: set block_kv=None"
            )
        if self.probability_from == "softmax" and self.backward_block_kv is not None:
            raise ValueError(
                "probability_from='softmax' needs the whole row: set "
                "backward_block_kv=None"
            )
        if (self.exponential == "exp2_polynomial") != (self.exp2_degree is not None):
            raise ValueError(
                "exp2_degree goes with exponential='exp2_polynomial', and only with it"
            )
        if self.dq_sum == "integers" and not (
            self.dq_centre == "keys"
            and self.dq_dlogits is not None
            and self.scales_heads
            and self.dq_dlogits.format.max_exponent <= 15  # what 32 bits hold
        ):
            raise ValueError(
                "dq_sum='integers' needs numbers in units of their own: set "
                "dq_centre='keys' and dq_dlogits=Step(FP16)"
            )
        if self.ring_size > 1 and self.probability_from == "softmax":
            raise ValueError(
                "ring_size above 1 needs probability_from='lse': no device has the row"
            )
        of_blocks = self.ring_size == 1 or self.normalise != "before_product"
        if self.ring_merge == "carry" and not of_blocks:
            raise ValueError(
                "ring_merge='carry' needs normalise='once' or 'each_step'; merge by "
                "'lse' instead"
            )
        in_base_2 = self.exponential != "exp" and self.normalise == "once"
        if self.ring_merge == "carry_whole" and not in_base_2:
            raise ValueError(
                "ring_merge='carry_whole' needs base 2, normalise='once': use 'carry'"
            )

    def backward_hops(self, ring_size: int) -> range:
        """0 .. W - 1, or 1 .. W."""
        first = 1 if self.ring_own_keys == "last" else 0
        return range(first, first + ring_size)

    @property
    def query_format(self) -> NumberFormat:
        """That of Q as an operand of products."""
        return self.inputs if self.scaled_query is None else self.scaled_query.format

    @property
    def scales_heads(self) -> bool:
        """Whether r above brings dS into the range of `dq_dlogits`, head by head."""
        step = self.dq_dlogits
        return step is not None and step.format.exponent_bits < FP32.exponent_bits

    def replace_format(self, old: NumberFormat, new: NumberFormat) -> "Recipe":
        """A copy with every step kept in `old`, and `inputs`, kept in `new` instead."""
        changes: dict = {
            field.name: dataclasses.replace(step, format=new)
            for field in dataclasses.fields(self)
            if isinstance(step := getattr(self, field.name), Step)
            and step.format == old
        }
        if self.inputs == old:
            changes["inputs"] = new
        return dataclasses.replace(self, **changes)

    def with_inputs(self, fmt: NumberFormat) -> "Recipe":
        """The same algorithm on inputs of another format: BF16 to FP16 and back.

        Every step that was kept in the old input format is kept in the new one. A
        `dq_dlogits` that already was FP16 cannot be told from it on the way back.
        """
        return self.replace_format(self.inputs, fmt)


# What is -inf for a key that is hidden (or has a bias of -inf), at first, or for a row
# that sees nothing.
_MAY_BE_MINUS_INFINITY = "logits", "shifted", "row_max", "correction", "lse"


def _check_minus_infinity(recipe: Recipe) -> None:
    for name in _MAY_BE_MINUS_INFINITY:
        fmt = getattr(recipe, name).format
        if not (fmt.has_inf or fmt.saturates):
            raise ValueError(
                f"{name} must hold -inf, of which {fmt.name} makes NaN; use the "
                "format's .saturating()"
            )
    fmt = recipe.shifted.format
    # 2^-150 is nothing, not even a subnormal of FP32.
    if fmt.saturates and fmt.max_finite < 150:
        raise ValueError(
            f"shifted must reach 150, or hidden keys would have weight, got {fmt.name} "
            f"that saturates at {fmt.max_finite:g}"
        )


def _check_constants(recipe: Recipe) -> None:
    """Numbers that are compiled in must be such of the carrier, and not subnormal."""
    carrier = recipe.carrier
    for name in ("probability_scale", "dlogits_scale"):
        value = getattr(recipe, name)
        # Its reciprocal, too: a compiler may divide by multiplying.
        if not carrier.min_normal <= value <= 1 / carrier.min_normal:
            raise ValueError(
                f"{name} must lie between 2**{carrier.min_exponent} and "
                f"2**{-carrier.min_exponent}, for a {carrier.name} carrier, got {value}"
            )
    for name in ("rescale_threshold", "repeated_max_factor"):
        value = getattr(recipe, name)
        if value is not None and value > carrier.max_finite:
            raise ValueError(
                f"{name} must be at most {carrier.max_finite:g}, for a {carrier.name} "
                f"carrier, got {value}"
            )


def _as_python(field: dataclasses.Field, value: Any) -> Any:
    """NumPy's numbers as Python's: theirs would widen a carrier's under x64.

    What is no number of the field's kind becomes nan, which no field takes.
    """
    kinds = get_args(field.type) or (field.type,)
    if not (int in kinds or float in kinds) or value is None and type(None) in kinds:
        return value
    if isinstance(value, bool):
        return math.nan
    if int in kinds:
        return int(value) if isinstance(value, numbers.Integral) else math.nan
    return float(value) if isinstance(value, numbers.Real) else math.nan


def _fault(field: dataclasses.Field, value: Any) -> str | None:
    """What `value` should have been for a field of `Recipe`, or None if it will do."""
    if field.type in (Step, NumberFormat):
        kind = "a Step" if field.type is Step else "a NumberFormat"
        return None if isinstance(value, field.type) else kind
    choices = get_args(field.type)
    if Step in choices:
        return None if isinstance(value, choices) else "a Step or None"
    if choices and isinstance(choices[0], str):
        return None if value in choices else f"one of {', '.join(choices)}"
    if field.name == "ring_size":
        return None if value >= 1 else "a whole number of at least 1"
    if "block" in field.name or field.name == "dot_chunk":
        fits = value is None or value >= 1
        return None if fits else "a whole number of at least 1, or None"
    if field.name in ("probability_scale", "dlogits_scale"):
        if not 0 < value < math.inf:
            return "positive and finite"
    if field.name == "dlogits_scale" and math.frexp(value)[0] != 0.5:
        return "a power of two"  # So that undoing it is exact.
    if field.name == "dot_alignment":
        fits = value is None or 1 <= value <= 40
        return None if fits else "a whole number from 1 to 40, or None"
    if field.name == "rescale_threshold" and not 0 <= value < math.inf:
        return "finite and at least 0"
    if field.name == "exp2_degree" and value not in (None, 2, 3, 4, 5):
        return "2, 3, 4 or 5"
    if field.name == "repeated_max_factor" and value is not None:
        return None if 1 <= value < math.inf else "finite and at least 1, or None"
    return None
