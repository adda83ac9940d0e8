"""Decoding: one beam search, used by RAG-Token and, per document, by RAG-Sequence."""
