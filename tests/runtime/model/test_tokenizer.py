"""Tokens against llama.cpp, by hand, and as what must come back from them."""

from __future__ import annotations

import sys
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit.kernels.errors import ModelError
from lowbit.runtime.model.gguf_file import GgufFile
from lowbit.runtime.model.pretokenizers import PRETOKENIZERS
from lowbit.runtime.model.tokenizer import Tokenizer
from tiny_models import SPECIAL, byte_symbols, tokenizer_keys, write_model
from tokenizer_texts import byte_level_keys, mixtures, scored_keys


def write(path, keys):
    """A file with a tokenizer and little else."""
    rows = len(keys["tokenizer.ggml.tokens"])
    return write_model(path / "m.gguf", vocabulary=rows, tokenizer=False, metadata=keys, layers=1, width=32, heads=2)


def tokenizer(path, keys):
    with GgufFile(write(path, keys)) as file:
        return Tokenizer(file)


def spelled(tokenizer, text, **options):
    return [tokenizer.spelled(token, special=True).decode() for token in tokenizer.encode(text, **options)]


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2):
    with GgufFile(smollm2) as file:
        return Tokenizer(file)


@pytest.fixture(scope="module")
def all_bytes(tmp_path_factory):
    """A vocabulary with every byte; SmolLM2's lacks a few control characters, which it drops."""
    return tokenizer(tmp_path_factory.mktemp("all_bytes"), byte_level_keys("llama-bpe"))


@pytest.fixture
def byte_level(tmp_path):
    return tokenizer(tmp_path, byte_level_keys("smollm"))


@pytest.fixture
def scored(tmp_path):
    return tokenizer(tmp_path, scored_keys(prefix=True))


# -- the same tokens as others -----------------------------------------------------------------------------------------


def test_the_real_model_s_tokens(smollm2_tokenizer):
    """Ids that llama.cpp and the published tokenizer give."""
    ids = smollm2_tokenizer.encode("Hello world! 12345 <|im_start|>user\n\tx")
    assert ids == [19556, 905, 17, 216, 33, 34, 35, 36, 37, 216, 1, 4093, 198, 197, 104]
    assert (smollm2_tokenizer.bos, smollm2_tokenizer.eos, smollm2_tokenizer.ends) == (1, 2, {0, 2})
    assert len(smollm2_tokenizer) == 49152
    assert "<|im_start|>" in smollm2_tokenizer.chat_template


@pytest.mark.parametrize("special", [True, False])
def test_the_real_model_agrees_with_llama_cpp(smollm2, smollm2_tokenizer, special):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    other = llama_cpp.Llama(str(smollm2), vocab_only=True, verbose=False)
    for text in mixtures(1500, ("<|im_start|>", "<|endoftext|>")):
        ids = smollm2_tokenizer.encode(text, special=special, start=False)
        assert ids == other.tokenize(text.encode(), add_bos=False, special=special), repr(text)


@pytest.mark.parametrize("pre", PRETOKENIZERS)
def test_pretokenizers_agree_with_llama_cpp(tmp_path, pre):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    path = write(tmp_path, byte_level_keys(pre))
    with GgufFile(path) as file:
        ours = Tokenizer(file)
    other = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    for text in mixtures(500):
        if PRETOKENIZERS[pre].compose:
            text = unicodedata.normalize("NFC", text)  # which llama.cpp leaves out
        assert ours.encode(text, start=False) == other.tokenize(text.encode(), add_bos=False, special=True), repr(text)


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("special", [True, False])
def test_sentencepiece_agrees_with_llama_cpp(tmp_path, prefix, special):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    path = write(tmp_path, scored_keys(prefix))
    with GgufFile(path) as file:
        ours = Tokenizer(file)
    other = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    for text in mixtures(1000, ("<s>", "</s>", "<tool>", "<unk>", "<0x41>", "▁")):
        ids = ours.encode(text, special=special, start=False)
        assert ids == other.tokenize(text.encode(), add_bos=False, special=special), repr(text)


# -- by hand -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["12345", " x", "'", "L"]),
        ("smollm", ["1", "2", "3", "4", "5", " x", "'", "L"]),
        ("llama-bpe", ["123", "4", "5", " x", "'L"]),
        ("qwen2", ["1", "2", "3", "4", "5", " x", "'L"]),
        ("tekken", ["1", "2", "3", "4", "5", " x", "'L"]),
        ("default", ["123", "4", "5", " x", "'", "L"]),
    ],
)
def test_pretokenizers_cut_numbers_and_words(tmp_path, pre, pieces):
    tokens = [*byte_symbols(), "12", "123", "1234", "12345", "Ġx", "'L"]
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["1 2", "12 3", "123 4", "1234 5", "Ġ x", "' L"],
    }
    assert spelled(tokenizer(tmp_path, keys), "12345 x'L") == pieces


def test_whole_words_need_no_merge(tmp_path):
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*byte_symbols(), "abc"],
        "tokenizer.ggml.merges": ["x y"],
    }
    assert spelled(tokenizer(tmp_path, keys | {"tokenizer.ggml.pre": "llama-bpe"}), "abc") == ["abc"]
    assert spelled(tokenizer(tmp_path, keys | {"tokenizer.ggml.pre": "smollm"}), "abc") == ["a", "b", "c"]


def test_qwen_composes_characters(tmp_path):
    qwen = tokenizer(tmp_path, byte_level_keys("qwen2"))
    assert qwen.encode("e\u0301") == qwen.encode("é")


def test_the_best_score_is_merged_first(tmp_path):
    keys = scored_keys(prefix=False)
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "c", "ab", "bc"]
    keys |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1]}
    for scores, pieces in (((-2.0, -1.0), ["a", "bc"]), ((-1.0, -2.0), ["ab", "c"])):
        keys["tokenizer.ggml.scores"] = [0.0, 0.0, 0.0, -9.0, -9.0, -9.0, *scores]
        assert spelled(tokenizer(tmp_path, keys), "abc", start=False) == pieces


def test_sentencepiece_spells_unknown_characters_as_bytes(scored):
    ids = scored.encode("ψ", start=False)
    assert [scored.vocabulary.texts[token] for token in ids] == ["▁", "<0xCF>", "<0x88>"]
    assert scored.decode(ids) == "ψ"


# -- special tokens ----------------------------------------------------------------------------------------------------


def test_control_tokens_are_made_where_asked_for(byte_level):
    text = f"a{SPECIAL[1]}b"
    assert byte_level.encode(text, special=True)[1] == 1
    plain = byte_level.encode(text, special=False)
    assert 1 not in plain and byte_level.decode(plain) == text
    assert byte_level.decode(byte_level.encode(text)) == "ab"
    assert byte_level.decode(byte_level.encode(text), special=True) == text


def test_plain_text_never_becomes_a_control_token(scored):
    for token, kind in enumerate(scored.vocabulary.kinds):
        if kind == 3:
            assert token not in scored.encode(scored.vocabulary.texts[token], special=False, start=False)


def test_user_defined_tokens_are_always_made(scored):
    tool = scored.vocabulary.texts.index("<tool>")
    assert scored.encode("a<tool>", special=False)[-1] == tool
    assert "<tool>" in scored.decode([tool])


def test_a_longer_special_token_wins(tmp_path):
    keys = tokenizer_keys(288)
    keys["tokenizer.ggml.tokens"][-2:] = ["<|im_start|>x", "<|im"]
    keys["tokenizer.ggml.token_type"][-2:] = [3, 3]
    assert tokenizer(tmp_path, keys).encode("<|im_start|>x<|im_start|><|im") == [286, 1, 287]


@pytest.mark.parametrize("add_bos", [True, False, None])
@pytest.mark.parametrize("add_eos", [True, False, None])
@pytest.mark.parametrize("pre", ["smollm", "llama-bpe"])
def test_bos_and_eos_as_the_file_asks(tmp_path, add_bos, add_eos, pre):
    keys = {"tokenizer.ggml.add_bos_token": add_bos, "tokenizer.ggml.add_eos_token": add_eos}
    found = tokenizer(tmp_path, byte_level_keys(pre) | keys)
    inner = found.encode("Hello", start=False)
    begins = [1] if (pre == "llama-bpe" if add_bos is None else add_bos) else []
    assert found.encode("Hello") == [*begins, *inner, *([2] if add_eos else [])]
    assert found.encode("<|im_start|>Hello")[:2] == [1, inner[0]]
    assert found.encode("") == [*begins, *([2] if add_eos else [])]


def test_sentencepiece_begins_with_bos_unless_told_otherwise(tmp_path):
    keys = scored_keys(prefix=True)
    assert tokenizer(tmp_path, keys).encode("a")[0] == 1
    assert tokenizer(tmp_path, keys | {"tokenizer.ggml.add_bos_token": False}).encode("a")[0] != 1


def test_ends_of_generation(tmp_path):
    keys = tokenizer_keys(288)
    keys["tokenizer.ggml.tokens"][-4:] = ["<|eot_id|>", "<|endoftext|>", "<eom>", "<|end|>"]
    keys["tokenizer.ggml.token_type"][-4:] = [3, 3, 3, 1]
    keys |= {"tokenizer.ggml.eot_token_id": 284, "tokenizer.ggml.eom_token_id": 286}
    found = tokenizer(tmp_path, keys)
    assert (found.eos, found.eot, found.ends) == (2, 284, {2, 284, 285, 286})


# -- back to text ------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=300, derandomize=True)
@given(st.text(max_size=60))
def test_any_text_comes_back(all_bytes, text):
    assert all_bytes.decode(all_bytes.encode(text, special=False)) == text


@pytest.mark.parametrize("keys", [byte_level_keys("llama-bpe"), scored_keys(True), scored_keys(False)])
def test_texts_come_back(tmp_path, keys):
    found = tokenizer(tmp_path, keys)
    for text in mixtures(300):
        assert found.decode(found.encode(text, special=False)) == text


@settings(deadline=None, max_examples=200, derandomize=True)
@given(st.text(max_size=40))
def test_a_stream_gives_whole_characters_as_soon_as_they_are_whole(all_bytes, text):
    stream = all_bytes.stream()
    given_bytes, given_text = b"", ""
    for token in all_bytes.encode(text, special=False):
        given_bytes += all_bytes.spelled(token)
        given_text += stream.feed(token)
        whole = given_bytes.decode("utf-8", "ignore")
        assert given_text == whole
    assert given_text + stream.finish() == text


def test_a_stream_that_ends_within_a_character_says_so(byte_level):
    stream = byte_level.stream()
    first = byte_level.vocabulary.texts.index(byte_symbols()[0xF0])
    assert (stream.feed(first), stream.finish(), stream.feed(first)) == ("", "\ufffd", "")


def test_a_stream_of_sentencepiece_keeps_the_first_space(scored):
    ids = scored.encode("they see", start=False)
    stream = scored.stream()
    assert "".join(map(stream.feed, ids)) == " they see"
    assert scored.decode(ids) == "they see"


def test_control_tokens_spell_nothing_unless_asked(byte_level):
    assert byte_level.stream().feed(1) == ""
    assert byte_level.stream(special=True).feed(1) == SPECIAL[1]
    for wrong in (-1, len(byte_level)):
        with pytest.raises(IndexError):
            byte_level.decode([wrong])


def test_lone_surrogates_become_replacement_characters(smollm2_tokenizer):
    assert set(smollm2_tokenizer.decode(smollm2_tokenizer.encode("a\ud800b"))) == {"a", "b", "\ufffd"}


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"tokenizer.ggml.model": None}, r"tokenizer\.ggml\.model is missing"),
        ({"tokenizer.ggml.model": "t5"}, r"tokenizer 't5' is unsupported \(supported: gpt2, llama\)"),
        ({"tokenizer.ggml.pre": "falcon"}, r"pre-tokenizer 'falcon' is unsupported"),
        ({"tokenizer.ggml.tokens": None}, r"tokenizer\.ggml\.tokens is missing"),
        ({"tokenizer.ggml.tokens": [1, 2]}, r"tokenizer\.ggml\.tokens must be a list of texts"),
        ({"tokenizer.ggml.tokens": ["a"] * 289, "tokenizer.ggml.token_type": None}, r"289 tokens, but an embedding of"),
        ({"tokenizer.ggml.tokens": ["a" * 5000, *"b" * 287]}, r"tokens is damaged: a token has 5000 characters"),
        ({"tokenizer.ggml.token_type": [1]}, r"1 types of tokens for 288 tokens"),
        ({"tokenizer.ggml.merges": None}, r"tokenizer\.ggml\.merges is missing"),
        ({"tokenizer.ggml.eos_token_id": 288}, r"eos_token_id must be a number from 0 to 287, not 288"),
        ({"tokenizer.ggml.add_bos_token": 1}, r"add_bos_token must be true or false, not 1"),
        ({"tokenizer.ggml.model": "llama"}, r"tokenizer\.ggml\.scores is missing"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.5]}, r"1 scores for 288 tokens"),
    ],
)
def test_refusals_name_what_is_wrong(tmp_path, keys, said):
    path = write_model(tmp_path / "m.gguf", metadata=keys)
    with GgufFile(path) as file, pytest.raises(ModelError, match=said) as caught:
        Tokenizer(file)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_tokens_that_are_no_text_are_refused(tmp_path):
    path = write_model(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace("Ġthe".encode(), b"\xff\xfethe"))
    with GgufFile(path) as file, pytest.raises(ModelError, match=r"tokenizer\.ggml\.tokens is damaged: not UTF-8"):
        Tokenizer(file)


def test_without_the_tokenizers_package_the_message_says_what_to_install(tmp_path, monkeypatch):
    path = write_model(tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with GgufFile(path) as file, pytest.raises(ModelError, match=r"pip install 'lowbit\[models\]'"):
        Tokenizer(file)
