"""`python -m attn_jax.audit`."""

import sys

from attn_jax.audit.command import main

if __name__ == "__main__":
    sys.exit(main())
