"""Texts that tokenizers disagree on, and vocabularies learned from them whose tokens cross every boundary."""

from __future__ import annotations

import json
import random
from typing import Any

from tiny_models import BOS, EOS, SPECIAL, UNKNOWN, byte_symbols

TEXTS = (
    "Hello world, it's 12345 o'clock; they'll see I'VE 3.14159!\n",
    "  def f(x):\n\t\treturn x**2  # comment\n\n\n",
    "naïve café — “quotes” … ÀÉÎ straße\r\n",
    "日本語のテキスト、中文字符。한국어\n",
    "😀👍🏽👩‍👩‍👧 🇩🇪\n",
    "a   b    c\t\td \u00a0\u3000e  \n  \n",
    "x=1;y=22;z=333;w=4444;v=55555\n",
    'http://a.b/c?d=e&f=g#h <tag attr="v">$5+=~^|`</tag>\n',
    "² ½ Ⅷ ٣٤٥ १२३ 12½\n",
    "don't DON'T we're WE'RE 's'S\n",
)

PIECES = (
    *"abcXYZ 1239'\n\t\r.,;!?-_$+<=>^~|`()/#",
    *("  ", "   ", "\u00a0", "\u3000", "\u2003", "é", "ß", "Σ", "日", "本", "語", "。", "😀", "👍🏽", "\u200d"),
    *(
        "²",
        "½",
        "٣",
        "Ⅷ",
        "'s",
        "'LL",
        "don't",
        "ǅ",
        "ʰ",
        "한",
        "\x85",
        "\x0b",
        "\x1c",
        "\u2028",
        "ﬁ",
        "İ",
        "ſ",
    ),
    *("Hello", "world", "they"),
)


def mixtures(count: int, extra: tuple[str, ...] = (), seed: int = 0) -> list[str]:
    """Texts of up to 25 of `PIECES` at random, and `TEXTS`."""
    draw = random.Random(seed)
    pieces = PIECES + extra
    return [*TEXTS, *("".join(draw.choices(pieces, k=draw.randint(1, 25))) for _ in range(count))]


def byte_level_keys(pre: str, size: int = 600) -> dict[str, Any]:
    """A tokenizer's metadata: byte-level BPE learned from `TEXTS` without cutting them into words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=byte_symbols(), special_tokens=list(SPECIAL), max_token_length=6
    )
    tokens, merges = _learned(fast, trainer, TEXTS)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[1] * (len(tokens) - 3)],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.unknown_token_id": UNKNOWN,
    }


def scored_keys(prefix: bool) -> dict[str, Any]:
    """A tokenizer's metadata: SentencePiece's BPE learned from `TEXTS`, with a user-defined token ``<tool>``."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=500, max_token_length=6)
    learned, _ = _learned(fast, trainer, [text.replace("\n", "") for text in TEXTS])
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<tool>", *learned]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, 4, *[1] * len(learned)],
        "tokenizer.ggml.scores": [*[0.0] * 260, *(-float(i) for i in range(len(learned)))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def _learned(fast: Any, trainer: Any, texts: Any) -> tuple[list[str], list[str]]:
    """Tokens by id, and merges as GGUF files spell them."""
    fast.train_from_iterator(list(texts) * 3, trainer)
    model = json.loads(fast.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [" ".join(merge) for merge in model["merges"]]
