"""A lock: one thread of an audit runs something on the device at a time.

A library may record what it launches into a CUDA graph. Whatever another thread
launches meanwhile, and be it a copy, ends up in the graph or breaks it; with cuDNN that
was seen, on an H100 and an H200. So threads compile beside each other, and run what
they have compiled one after the other.
"""

import threading

ALONE = threading.RLock()
"""Held while a program runs and its results are fetched."""
