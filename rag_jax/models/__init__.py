"""Linen modules and the pure functions around them; no I/O, no retrieval."""
