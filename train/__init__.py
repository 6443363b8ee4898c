"""Trains a text-to-image transformer with an attention function of choice."""
