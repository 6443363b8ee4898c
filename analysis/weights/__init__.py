"""How far the weights of two models lie apart: `analysis.weights.compare.compare`.

Imports nothing, so that `fast_sort` can be called before NumPy is there.
"""

import os
import sys
from pathlib import Path

# What NumPy from 2.4 on and what earlier releases call their AVX-512 code.
_AVX512 = "X86_V4 AVX512_ICL AVX512_SPR AVX512_SKX"


def fast_sort() -> None:
    """Keeps NumPy off its AVX-512 sort on processors of AMD, for this process.

    It stores through a masked compression, which Zen 4 runs as microcode: 1e7 FP32
    numbers take 0.41 s there, against 0.07 s with AVX2. Does nothing once NumPy is
    imported, or where NPY_DISABLE_CPU_FEATURES is set.
    """
    try:
        amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return
    if amd and "numpy" not in sys.modules:
        os.environ.setdefault("NPY_DISABLE_CPU_FEATURES", _AVX512)
