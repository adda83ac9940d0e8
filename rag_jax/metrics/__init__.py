"""Metrics over answers and over retrieved passages: pure Python and numpy."""
