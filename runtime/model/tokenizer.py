"""From text to tokens and back, with the tokenizer that a GGUF file holds.

Two kinds are supported: byte-level BPE (``gpt2``), whose tokens spell bytes as printable characters, and the BPE of
SentencePiece (``llama``), whose tokens have scores, ``▁`` for a space, and a token for each byte that no other covers.

Text that spells a control token, such as ``<|im_start|>``, becomes that token only where the caller asks for it. Other
text never does.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .config import EMBEDDING
from .gguf_file import GgufFile
from .gguf_header import shown
from .pretokenizers import PRETOKENIZERS, Pretokenizer
from .vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Vocabulary, decoded

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

SPACE = "▁"
"""What SentencePiece writes for a space."""


class Tokenizer:
    """The tokenizer of a model. Methods may be called from several threads.

    Attributes
    ----------
    vocabulary : Vocabulary
    bos, eos, eot : int or None
        Ids of the tokens that begin a text, end it, and end a turn of a conversation.
    ends : frozenset of int
        Ids that end a generation: ``eos``, ``eot`` and their like.
    chat_template : str or None
        A Jinja template, as the file has it.

    Raises
    ------
    ModelError
        If the file's tokenizer or pre-tokenizer is unsupported, named, or its tables are damaged.
    """

    def __init__(self, file: GgufFile) -> None:
        model = file.text("tokenizer.ggml.model")
        if model not in ("gpt2", "llama"):
            raise file.error(f"the tokenizer {shown(model)} is unsupported (supported: gpt2, llama)")
        self.vocabulary = words = Vocabulary.read(file)
        rows = file.tensors[EMBEDDING].rows if EMBEDDING in file.tensors else len(words.texts)
        if len(words.texts) > rows:
            raise file.error(f"{len(words.texts)} tokens, but an embedding of {rows} rows")
        self.bos, self.eos, self.eot, self.ends = words.bos, words.eos, words.eot, words.ends
        self.chat_template = file.text("tokenizer.chat_template", "") or None
        self._sentencepiece = model == "llama"
        way = Pretokenizer((), add_bos=True) if self._sentencepiece else _pretokenizer(file)
        self._prefix = self._sentencepiece and file.flag("tokenizer.ggml.add_space_prefix", True)
        self._add_bos = file.flag("tokenizer.ggml.add_bos_token", way.add_bos) and self.bos is not None
        self._add_eos = file.flag("tokenizer.ggml.add_eos_token", False) and self.eos is not None
        self._fast = _scored(file, words) if self._sentencepiece else _byte_level(file, words, way)

    def __len__(self) -> int:
        return len(self.vocabulary.texts)

    def encode(self, text: str, special: bool = True, start: bool = True) -> list[int]:
        """Tokens of ``text``.

        Parameters
        ----------
        text : str
        special : bool
            Whether text that spells a control token becomes that token.
        start : bool
            Whether the text is the beginning: BOS and EOS are added where the file asks for them, unless a BOS token is
            there already.
        """
        text = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        pattern = self._special if special else self._user_defined
        ids: list[int] = []
        rest = 0
        for match in pattern.finditer(text) if pattern is not None else ():
            ids += self._plain(text[rest : match.start()])
            ids.append(self._ids[match.group()])
            rest = match.end()
        ids += self._plain(text[rest:])
        if start and self._add_bos and self.bos is not None and ids[:1] != [self.bos]:
            ids.insert(0, self.bos)
        if start and self._add_eos and self.eos is not None:
            ids.append(self.eos)
        return ids

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text that ``ids`` spell; bytes that are no UTF-8 become U+FFFD.

        Control tokens are left out, or spelled if ``special``. Of a text that begins with the space that `encode` puts
        before it, that space is left out.

        Raises
        ------
        IndexError
            For an id that is none.
        """
        text = b"".join(self.spelled(i, special) for i in ids).decode("utf-8", "replace")
        return text[1:] if self._prefix and text.startswith(" ") else text

    def stream(self, special: bool = False) -> Stream:
        """A decoder of tokens that come one by one and continue a text."""
        return Stream(self, special)

    def spelled(self, token: int, special: bool = False) -> bytes:
        """The bytes that a token spells: none for control tokens, unless ``special``."""
        if not 0 <= token < len(self.vocabulary.texts):
            raise IndexError(f"no token has the id {token}: there are {len(self.vocabulary.texts)}")
        text, kind = self.vocabulary.texts[token], self.vocabulary.kinds[token]
        if kind in (CONTROL, UNKNOWN):
            return text.encode() if special else b""
        if kind == USER_DEFINED and not self._sentencepiece:
            return text.encode()
        if not self._sentencepiece:
            return b"".join(_BYTES.get(each, each.encode()) for each in text)
        if kind == BYTE and re.fullmatch("<0x[0-9A-F]{2}>", text):
            return bytes([int(text[3:5], 16)])
        return text.replace(SPACE, " ").encode()

    # -- pieces -------------------------------------------------------------------------------------------------------

    def _plain(self, text: str) -> list[int]:
        """Tokens of text that spells no special token."""
        if not text:
            return []
        if self._sentencepiece:
            text = (" " + text if self._prefix else text).replace(" ", SPACE)
        ids: list[int] = self._fast.encode(text, add_special_tokens=False).ids
        return ids

    @cached_property
    def _ids(self) -> dict[str, int]:
        return self.vocabulary.of(CONTROL, USER_DEFINED, UNKNOWN)

    @cached_property
    def _special(self) -> re.Pattern[str] | None:
        return _any_of(self._ids)

    @cached_property
    def _user_defined(self) -> re.Pattern[str] | None:
        return _any_of(self.vocabulary.of(USER_DEFINED))


class Stream:
    """Text of tokens that come one by one. Bytes of an unfinished character wait for the tokens that finish it."""

    def __init__(self, tokenizer: Tokenizer, special: bool) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The text that ``token`` completes, which may be empty."""
        return self._decoder.decode(self._tokenizer.spelled(token, self._special))

    def finish(self) -> str:
        """What still waits, as U+FFFD. The stream can then be used again."""
        return self._decoder.decode(b"", final=True)


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Matches any of some texts, a longer one before its beginnings."""
    found = sorted((text for text in texts if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, found))) if found else None


def _pretokenizer(file: GgufFile) -> Pretokenizer:
    name = file.text("tokenizer.ggml.pre", "default")
    if name not in PRETOKENIZERS:
        known = ", ".join(PRETOKENIZERS)
        raise file.error(f"the pre-tokenizer {shown(name)} is unsupported (supported: {known})")
    return PRETOKENIZERS[name]


def _byte_level(file: GgufFile, words: Vocabulary, way: Pretokenizer) -> FastTokenizer:
    """BPE over bytes, which merges in the order of the file's list."""
    ids = words.of(NORMAL, UNKNOWN, USER_DEFINED, BYTE)
    texts, merges = words.texts, []
    for merge in decoded(file, "merges"):
        left, _, right = merge.rpartition(" ")
        # Other entries make nothing that text may become. Tokens' own texts are listed, not copies of them.
        if left in ids and right in ids and left + right in ids:
            merges.append((texts[ids[left]], texts[ids[right]]))

    def build(tokenizers: Any) -> FastTokenizer:
        fast: FastTokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ids, merges, ignore_merges=way.whole_words))
        if way.compose:
            fast.normalizer = tokenizers.normalizers.NFC()
        split = tokenizers.pre_tokenizers.Split
        cuts = [split(tokenizers.Regex(pattern), "isolated") for pattern in way.patterns]
        byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*cuts, byte_level])
        return fast

    return _built(file, build)


def _scored(file: GgufFile, words: Vocabulary) -> FastTokenizer:
    """SentencePiece's BPE, which merges what has the best score: any two tokens that spell a third one."""
    scores = file.numbers("tokenizer.ggml.scores")
    if len(scores) != len(words.texts):
        raise file.error(f"{len(scores)} scores for {len(words.texts)} tokens")
    ids = words.of(NORMAL, USER_DEFINED, BYTE)
    if words.unknown is not None:
        ids.setdefault(words.texts[words.unknown], words.unknown)
    found = []
    for text, i in ids.items():
        if words.kinds[i] in (NORMAL, USER_DEFINED):
            halves = ((text[:at], text[at:]) for at in range(1, len(text)))
            found += [(scores[i], left, right) for left, right in halves if left in ids and right in ids]
    found.sort(key=lambda merge: -merge[0])
    merges = [(left, right) for _, left, right in found]
    unknown = None if words.unknown is None else words.texts[words.unknown]

    def build(tokenizers: Any) -> FastTokenizer:
        bpe = tokenizers.models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        fast: FastTokenizer = tokenizers.Tokenizer(bpe)
        return fast

    return _built(file, build)


def _built(file: GgufFile, build: Callable[[Any], FastTokenizer]) -> FastTokenizer:
    try:
        import tokenizers
    except ImportError:
        raise file.error("its tokenizer needs the tokenizers package: pip install 'lowbit[models]'") from None
    try:
        fast: FastTokenizer = build(tokenizers)
    except Exception as error:  # the package has no narrower class
        raise file.error(f"damaged tokenizer: {' '.join(str(error).split())}") from None
    return fast


def _byte_characters() -> dict[str, bytes]:
    """The byte that each character of byte-level BPE stands for: itself if printable, or the next from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    table = {chr(byte): bytes([byte]) for byte in printable}
    return table | {chr(256 + i): bytes([byte]) for i, byte in enumerate(others)}


_BYTES = _byte_characters()
