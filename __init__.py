"""lowbit: a layout autotuner for low-bit LLM decoding."""

__version__ = "0.1.0"
