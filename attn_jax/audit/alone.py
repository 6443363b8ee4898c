"""One thread of an audit at a time on the device.

A library may record what it launches into a CUDA graph when it is first called, as
cuDNN does. Whatever another thread launches meanwhile, and be it a copy, ends up in the
graph or breaks it: threads compile beside each other, and run what they have compiled
one after the other.
"""

import threading

ALONE = threading.RLock()
"""Held while a program runs and its results are fetched."""
