"""Decoding: one beam search for every way from questions with passages to answers."""
