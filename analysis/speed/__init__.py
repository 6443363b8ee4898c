"""What `python -m analysis speed` is made of: cases, timing, errors, two frameworks."""
