"""Decoding with a real model, read from a GGUF file."""
