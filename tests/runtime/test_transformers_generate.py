"""What `generate` and its users do with caches, and what is refused."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from lowbit.db.store import Store
from lowbit.kernels.errors import CacheFullError, DatabaseError, LowbitError, ModelError, ProblemError
from lowbit.runtime.select import FallbackWarning
from lowbit.runtime.transformers_cache import LowbitCache

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")
from lowbit.runtime import torch_cache  # noqa: E402
from small_transformers import CACHE, Rounded, decoding, eagerly, error, generated, ids_of, logits, made  # noqa: E402

TOLERANCE = {"f16": 2e-5}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    with decoding():
        yield


@pytest.mark.parametrize(
    "options",
    [{}, {"prefill_chunk_size": 16}, {"num_beams": 4}, {"prompt_lookup_num_tokens": 3, "eos_token_id": 199}],
    ids=["greedy", "chunks", "beams", "lookup"],
)
def test_generate_gives_the_same_tokens(options):
    model = made()
    ids = ids_of(1, 20).repeat(1, 3)
    own = own_tokens(model, ids, **options)
    assert generated(model, ids, LowbitCache(model.config), **options) == own


def own_tokens(model, ids, **options):
    model.set_attn_implementation("eager")
    found = generated(model, ids, Rounded(model.config, "f16"), **options)
    model.set_attn_implementation("lowbit")
    return found


def test_beams_that_part_often_are_merged(monkeypatch):
    model, ids = made(), ids_of(2, 30)
    found, most = [], []
    for segments in (1000, 2):
        monkeypatch.setattr(torch_cache, "MOST_SEGMENTS", segments)
        cache = LowbitCache(model.config, "q8_0", "q8_0")
        found.append(generated(model, ids, cache, num_beams=3, num_return_sequences=3))
        most.append(max(len(each.cache.segments) for each in cache.layers[0].sequences))
    assert found[0] == found[1]
    assert most[0] > 3 >= most[1]


def test_a_padded_batch_generates_what_its_sequences_do_alone():
    model = made()
    ids = ids_of(2, 30)
    mask = torch.ones_like(ids)
    mask[0, :11] = 0
    both = generated(model, ids, LowbitCache(model.config), attention_mask=mask)
    assert both[1] == generated(model, ids[1:], LowbitCache(model.config))[0]
    assert both[0] == generated(model, ids[:1, 11:], LowbitCache(model.config))[0]


@pytest.mark.parametrize("count", [-7, 0])
def test_crop(count):
    model = made()
    ids = ids_of(1, 60)
    cache = LowbitCache(model.config)
    whole = logits(model, cache, ids, (50,))
    cache.crop(count)
    assert cache.get_seq_length() == 60 + count
    if count:
        np.testing.assert_allclose(logits(model, cache, ids[:, count:], ()), whole[:, count:], atol=1e-5)
        cache.crop(55)  # what earlier releases pass: a length
        assert cache.get_seq_length() == 55
        cache.crop(100)
        assert cache.get_seq_length() == 55


def test_crop_past_padding():
    model = made()
    mask, ids = torch.ones(3, 80, dtype=torch.long), ids_of(3, 80)
    mask[0, 1:60:2] = mask[1, :5] = mask[1, 25:48] = 0
    cache = LowbitCache(model.config)
    logits(model, cache, ids, (60, 20), mask)
    cache.crop(-35)
    found = model(
        ids[:, 45:], attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, 45:], **{CACHE: cache}
    )
    expected = eagerly(model, Rounded(model.config, "f16"), ids, (60, 20), mask)[:, 45:]
    shown = mask.bool().numpy()[:, 45:]
    assert error(found.logits.double().numpy()[shown], expected[shown]) < TOLERANCE["f16"]


def test_copies_share_a_prompt_and_go_their_own_ways():
    model = made()
    prompt, ends = ids_of(1, 40), [ids_of(1, 9, seed) for seed in (1, 2)]
    first = LowbitCache(model.config)
    logits(model, first, prompt, (40,))
    second = copy.deepcopy(first)
    storages = {each.layers[1].sequences[0].cache.segments[0].storage for each in (first, second)}
    assert len(storages) == 1
    for cache, end in zip((first, second), ends, strict=True):
        found = logits(model, cache, end, (4,))
        expected = eagerly(model, Rounded(model.config, "f16"), torch.cat([prompt, end], 1), (40, 4))[:, 40:]
        assert error(found, expected) < TOLERANCE["f16"]


def test_sequences_are_picked_and_repeated():
    model = made()
    ids = ids_of(3, 40)
    cache = LowbitCache(model.config)
    logits(model, cache, ids[:, :30], (30,))
    cache.batch_select_indices(torch.tensor([True, False, True]))
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4
    ids = ids[[0, 0, 2, 2]]
    ids[1::2, 30:] += 1
    ids %= 200
    found = logits(model, cache, ids[:, 30:])
    assert error(found, eagerly(model, Rounded(model.config, "f16"), ids, (30,))[:, 30:]) < TOLERANCE["f16"]


def test_reset():
    model = made()
    ids = ids_of(2, 40)
    cache = LowbitCache(model.config)
    found = logits(model, cache, ids, (30,))
    cache.reset()
    assert (cache.get_seq_length(), cache.nbytes, cache.batch_size) == (0, 0, -1)
    np.testing.assert_allclose(logits(model, cache, ids[:1], (30,)), found[:1], atol=1e-5)


def test_sizes():
    model = made(heads=2, kv_heads=2, head_dim=64)
    cache = LowbitCache(model.config, "q8_0", "q4_0")
    assert (cache.get_max_length() if hasattr(cache, "get_max_length") else cache.get_max_cache_shape()) == 512
    assert (len(cache), cache.is_compileable, cache.is_sliding, cache.get_seq_length()) == (2, False, [False] * 2, 0)
    logits(model, cache, ids_of(1, 64), (64,))
    assert cache.nbytes == 2 * 2 * 64 * (64 + 4 + 32 + 4)


def test_a_compiled_model_goes_around_the_cache():
    model = made()
    ids = ids_of(1, 40)
    expected = logits(model, LowbitCache(model.config), ids, (38,))
    torch.compiler.reset()
    found = logits(torch.compile(model, backend="eager"), LowbitCache(model.config), ids, (38,))
    np.testing.assert_allclose(found, expected, atol=1e-5)


# -- refusals ---------------------------------------------------------------------------------------------------------


def refused(kind, message, function, *args, **kwargs):
    with pytest.raises(kind, match=message) as caught:
        function(*args, **kwargs)
    assert isinstance(caught.value, LowbitError) and "\n" not in str(caught.value)


def test_what_the_attention_does_not_do_is_refused_by_name():
    model, ids = made(), ids_of(1, 8)
    refused(ProblemError, "pass past_key_values=LowbitCache", model, ids)
    fresh = lambda: {CACHE: LowbitCache(model.config)}  # noqa: E731
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    refused(ProblemError, "masks of 4 axes", model, ids, attention_mask=mask, **fresh())
    with torch.enable_grad():
        refused(ProblemError, "keeps no gradients", model, ids, **fresh())
    attend = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["lowbit"]
    layer, query = LowbitCache(model.config).layers[0], torch.zeros(1, 4, 3, 64)
    for message, options in (
        ("attention sinks", {"s_aux": torch.zeros(4)}),
        ("position biases", {"position_bias": torch.zeros(1, 4, 3, 3)}),
        ("dropout", {"dropout": 0.1}),
        ("weights as an output", {"output_attentions": True}),
        ("later tokens", {"is_causal": False}),
        ("has sliding_window 9, and the cache was made for None", {"sliding_window": 9}),
        ("has softcap 2.0, and the cache was made for None", {"softcap": 2.0}),
    ):
        held = layer.update(torch.zeros(1, 2, 3, 64), torch.zeros(1, 2, 3, 64))
        refused(ProblemError, message, attend, None, query, *held, None, **options)
    held = layer.update(torch.zeros(1, 2, 3, 64), torch.zeros(1, 2, 3, 64))
    attend(None, query, *held, None)
    refused(ProblemError, "several layers read", attend, None, query, *held, None)


def test_patterns_that_are_not_causal_are_refused():
    masks = transformers.masking_utils
    mask = masks.ALL_MASK_ATTENTION_FUNCTIONS["lowbit"]
    sizes = {"batch_size": 1, "kv_length": 8, "q_length": 8, "cache_position": torch.arange(8)}
    assert mask(**sizes) is None
    refused(ProblemError, "this model asks for more", mask, **sizes, mask_function=masks.bidirectional_mask_function)
    refused(ProblemError, "this model asks for more", mask, **sizes, local_size=4, allow_is_causal_skip=False)


def test_sinks_are_refused_in_their_model():
    model = made("GptOss", num_local_experts=2, num_experts_per_tok=1, sliding_window=16)
    refused(ProblemError, "attention sinks", model, ids_of(1, 8), **{CACHE: LowbitCache(model.config)})
    model.set_attn_implementation("eager")
    found = logits(model, LowbitCache(model.config), ids_of(1, 40), (30,))
    assert error(found, eagerly(model, Rounded(model.config, "f16"), ids_of(1, 40), (30,))) < 1e-5


def test_models_that_keep_something_else_are_refused():
    for config, message in (
        (transformers.T5Config(), "has an encoder"),
        (transformers.Llama4TextConfig(num_hidden_layers=4), "layers of type chunked_attention"),
        (transformers.Gemma3nTextConfig(), "share keys and values"),
        (transformers.Qwen3NextConfig(), "layers of type linear_attention"),
    ):
        refused(ModelError, message, LowbitCache, config)


def test_full():
    model = made()
    cache = LowbitCache(model.config, max_tokens=20)
    logits(model, cache, ids_of(1, 18), (18,))
    refused(CacheFullError, "holds 18 of at most 20 tokens: no room for 3 more", model, ids_of(1, 3), **{CACHE: cache})
    assert cache.get_seq_length() == 18


def test_a_database_without_the_model_is_announced(tmp_path):
    model = made()
    with Store.open(tmp_path / "empty.db"):
        pass
    with pytest.warns(FallbackWarning, match="has no winner for attend h4/2 d64 q1 fp16: using untuned layouts"):
        logits(model, LowbitCache(model.config, database=tmp_path / "empty.db"), ids_of(1, 8), (8,))
    with pytest.raises(DatabaseError):
        LowbitCache(model.config, database=tmp_path / "none.db")


def test_bad_arguments():
    config = made().config
    refused(ProblemError, "unknown cache type 'q5_0'", LowbitCache, config, "q5_0")
    refused(ProblemError, "max_tokens must be", LowbitCache, config, max_tokens=-1)
    refused(ProblemError, "threads must be", LowbitCache, config, threads=1000)
    layer = LowbitCache(config).layers[0]
    zeros = torch.zeros(1, 2, 3, 64)
    refused(ProblemError, "must have one shape", layer.update, zeros, zeros[..., :32])
    layer.update(zeros, zeros)
    refused(ProblemError, "as those before", layer.update, zeros.repeat(2, 1, 1, 1), zeros.repeat(2, 1, 1, 1))


def test_old_tensors_are_not_mistaken_for_new_ones():
    layer = LowbitCache(made().config).layers[0]
    keys, _ = layer.update(torch.ones(1, 2, 3, 64), torch.ones(1, 2, 3, 64))
    assert keys.shape == (1, 2, 3, 64) and bool((keys + 1 == 2).all())
    later, _ = layer.update(torch.ones(1, 2, 1, 64), torch.ones(1, 2, 1, 64))
    assert later.shape == (1, 2, 4, 64) and later.sum() == 512


def test_a_refused_pass_leaves_no_trace():
    model, ids = made(), ids_of(1, 40)
    cache = LowbitCache(model.config)
    model(ids[:, :30], **{CACHE: cache})
    mask = torch.ones(1, 1, 10, 40, dtype=torch.bool).tril(30)
    refused(ProblemError, "masks of 4 axes", model, ids[:, 30:], attention_mask=mask, **{CACHE: cache})
    assert cache.get_seq_length() == 30
    found = model(ids[:, 30:], **{CACHE: cache}).logits.double().numpy()
    assert error(found, eagerly(model, Rounded(model.config, "f16"), ids, (30, 10))[:, 30:]) < TOLERANCE["f16"]


def test_a_pass_that_ended_half_way_is_noticed(monkeypatch):
    model, ids = made(), ids_of(1, 40)
    cache = LowbitCache(model.config)
    model(ids[:, :30], **{CACHE: cache})
    with monkeypatch.context() as patch:
        patch.setattr(cache.layers[1], "attend", lambda *args: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            model(ids[:, 30:], **{CACHE: cache})
    refused(
        ProblemError, r"40 tokens in the first layer and 30 in the last: call crop\(30\)", model, ids, **{CACHE: cache}
    )
    cache.crop(30)
    found = model(ids[:, 30:], **{CACHE: cache}).logits.double().numpy()
    assert error(found, eagerly(model, Rounded(model.config, "f16"), ids, (30, 10))[:, 30:]) < TOLERANCE["f16"]


def test_padding_that_is_rolled_back_is_forgotten():
    model, ids = made(), ids_of(2, 40)
    cache = LowbitCache(model.config)
    mask = torch.ones_like(ids)
    mask[0, 30:] = 0
    model(ids, attention_mask=mask, **{CACHE: cache})
    cache.crop(-10)
    found = model(ids[:, 30:], **{CACHE: cache}).logits.double().numpy()
    assert error(found, eagerly(model, Rounded(model.config, "f16"), ids, (30, 10))[:, 30:]) < TOLERANCE["f16"]


def test_an_assistant_drafts():
    model, ids = made(), ids_of(1, 20).repeat(1, 3)
    assistant = made(attention="eager")
    own = generated(model, ids, LowbitCache(model.config))
    cache = LowbitCache(model.config, threads=2)
    assert generated(model, ids, cache, assistant_model=assistant, eos_token_id=199) == own
    assert cache.get_seq_length() >= 60 + 23
