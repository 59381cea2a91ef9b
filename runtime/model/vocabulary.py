"""A tokenizer's tables as a GGUF file has them: tokens, what kind each is, and the ids with a meaning of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from .gguf_file import GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of tokens, with the numbers that files have for them."""

END_OF_GENERATION = frozenset(
    {
        "<|im_end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|end_of_turn|>",
        "<end_of_turn>",
        "</s>",
    }
)
"""Control tokens with which models end an answer, in whichever file they are."""

LONGEST_TOKEN = 2048
"""In characters. Vocabularies have runs of a few hundred spaces or dashes; what takes apart tokens is no faster than
their squares."""

_KEY = "tokenizer.ggml."


@dataclass(frozen=True)
class Vocabulary:
    """
    Attributes
    ----------
    texts : list of str
        Tokens by id, as the file spells them.
    kinds : list of int
        `NORMAL` and so on.
    bos, eos, eot, unknown : int or None
    ends : frozenset of int
        Ids that end a generation.
    """

    texts: list[str]
    kinds: list[int]
    bos: int | None
    eos: int | None
    eot: int | None
    unknown: int | None
    ends: frozenset[int]

    @classmethod
    def read(cls, file: GgufFile) -> Self:
        """
        Raises
        ------
        ModelError
            If tables are missing, damaged or contradict each other.
        """
        texts = list(decoded(file, "tokens"))
        kinds = [NORMAL] * len(texts)
        if _KEY + "token_type" in file:
            kinds = [int(kind) for kind in file.numbers(_KEY + "token_type")]
            if len(kinds) != len(texts):
                raise file.error(f"{len(kinds)} types of tokens for {len(texts)} tokens")
        if not texts:
            raise file.error(f"{_KEY}tokens is empty")
        longest = max(map(len, texts))
        if longest > LONGEST_TOKEN:
            raise file.error(f"{_KEY}tokens is damaged: a token has {longest} characters")

        def number(name: str) -> int | None:
            key = f"{_KEY}{name}_token_id"
            return file.integer(key, least=0, largest=len(texts) - 1) if key in file else None

        bos, eos, eot, unknown = (number(name) for name in ("bos", "eos", "eot", "unknown"))
        ends = {each for each in (eos, eot, number("eom")) if each is not None}
        ends |= {i for i, kind in enumerate(kinds) if kind == CONTROL and texts[i] in END_OF_GENERATION}
        return cls(texts, kinds, bos, eos, eot, unknown, frozenset(ends))

    def of(self, *kinds: int) -> dict[str, int]:
        """Ids of the tokens of some kinds by their text; the first one where several have it."""
        found: dict[str, int] = {}
        for i, (text, kind) in enumerate(zip(self.texts, self.kinds, strict=True)):
            if kind in kinds:
                found.setdefault(text, i)
        return found


def decoded(file: GgufFile, name: str) -> Iterator[str]:
    """The texts of one of the tokenizer's arrays."""
    try:
        for raw in file.strings(_KEY + name):
            yield raw.decode("utf-8")
    except UnicodeDecodeError:
        raise file.error(f"{_KEY}{name} is damaged: not UTF-8") from None
