"""How byte-level BPE tokenizers cut text into pieces that no token crosses.

A GGUF file names its way (``tokenizer.ggml.pre``); the patterns are those of the models' own tokenizers. Each one cuts
what the ones before it left, and what a pattern does not match is a piece, too.
"""

from __future__ import annotations

from dataclasses import dataclass

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


@dataclass(frozen=True)
class Pretokenizer:
    """
    Attributes
    ----------
    patterns : tuple of str
        Regular expressions in Oniguruma's dialect.
    compose : bool
        Whether text is brought into Unicode's composed form (NFC) first.
    whole_words : bool
        Whether a piece that is a token becomes it without merging.
    add_bos : bool
        Whether text begins with the BOS token where the file does not say.
    """

    patterns: tuple[str, ...]
    compose: bool = False
    whole_words: bool = False
    add_bos: bool = False


_SIMPLE = Pretokenizer((_GPT2,))
_SINGLE_DIGITS = Pretokenizer((r"\p{N}", _GPT2))
_LLAMA3 = Pretokenizer((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",), whole_words=True, add_bos=True)
_QWEN2 = Pretokenizer((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",), compose=True)
_TEKKEN = Pretokenizer(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    whole_words=True,
    add_bos=True,
)
_DEFAULT = Pretokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

PRETOKENIZERS = {
    "default": _DEFAULT,
    "gpt-2": _SIMPLE,
    "phi-2": _SIMPLE,
    "olmo": _SIMPLE,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "command-r": _SINGLE_DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
"""By the names that files have for them."""
