"""Decoding: from questions with passages to answers, by beam search, sampling or classification."""
