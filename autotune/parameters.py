"""How many weights presets have, and what one takes."""

from __future__ import annotations

WEIGHT_BITS = {"q4_0": 4.5, "q8_0": 8.5, "f16": 16.0}
"""Bits of a weight with its share of scales, by llama.cpp's names."""

PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-8b": 8_190_735_360,
    "gemma-2-2b": 2_614_341_888,
    "phi-2": 2_779_683_840,
    "qwen3.6-27b": 27_000_000_000,  # as its name says
}
"""Of each preset for memory, those for attention and more."""
