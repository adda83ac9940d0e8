"""Hugging Face checkpoints in and out, strict both ways and without torch."""
