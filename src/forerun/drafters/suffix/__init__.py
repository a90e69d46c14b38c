"""Drafting from text that was there before, without a model."""
