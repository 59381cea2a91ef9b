"""Types of tensors in GGUF files: their numbers, names and blocks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorType:
    """How a tensor's values are stored.

    Attributes
    ----------
    name : str
        As ggml calls it: ``Q4_K``.
    block : int
        Values of a block; rows are whole blocks.
    block_bytes : int
    """

    name: str
    block: int
    block_bytes: int


READABLE = {
    number: TensorType(*facts)
    for number, facts in {
        0: ("F32", 1, 4),
        1: ("F16", 1, 2),
        2: ("Q4_0", 32, 18),
        3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34),
        10: ("Q2_K", 256, 84),
        11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210),
        20: ("IQ4_NL", 32, 18),
        23: ("IQ4_XS", 256, 136),
        30: ("BF16", 1, 2),
    }.items()
}
"""The types that a model's tensors may have here, by their number in a file."""

UNREADABLE = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
"""Other types, so that a refusal can name them."""
