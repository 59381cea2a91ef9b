"""The decoder against the plain forward pass in float64, and against itself in other orders of the same work."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from lowbit.kernels.errors import CacheFullError, FitError, ModelError, ProblemError
from lowbit.runtime.model.model import Model
from plain_llama import logits
from tiny_models import ARCHITECTURES, write_model

TOKENS = [int(token) for token in np.random.default_rng(3).integers(3, 280, 75)]
EXACT = 3e-3
"""Of the spread of logits: what keys and values in fp16 cost."""


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def loaded(tmp_path, weights="exact", threads=2, **settings):
    path = write_model(tmp_path / "model.gguf", **settings)
    return path, Model.load(path, weights=weights, threads=threads)


def all_scores(session, tokens):
    return np.concatenate([scores.copy() for _, scores in session.scores(tokens)])


SHAPES = {
    "grouped": {},
    "not grouped": {"kv_heads": 4},
    "seven heads share one": {"heads": 7, "kv_heads": 1, "width": 224, "head_dim": 32},
    "channels of 80": {"heads": 2, "kv_heads": 1, "width": 160, "head_dim": 80},
    "channels of 96": {"heads": 3, "kv_heads": 1, "width": 96, "head_dim": 96},
    "channels of 128": {"heads": 4, "kv_heads": 2, "width": 128, "head_dim": 128},
    "untied": {"tied": False},
    "yarn": {
        "metadata": {
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
        }
    },
    "window": {"metadata": {"attention.sliding_window": 20}},
    "part of a head is rotated": {"metadata": {"rope.dimension_count": 8}},
    "factors": {"rope_factors": [1, 1, 1.5, 2, 4, 6, 8, 8]},
}  # fmt: skip


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_exact_weights_agree_with_float64(tmp_path, architecture, shape):
    path, model = loaded(tmp_path, architecture=architecture, **shape)
    expected = logits(path, TOKENS)
    found = all_scores(model.session(128), TOKENS)
    assert expected.std() > 0.1
    assert np.abs(found - expected).max() < EXACT * np.abs(expected).max()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "F16", "BF16", "F32"])
def test_tuned_weights_stay_near_what_the_file_says(tmp_path, kind):
    """Activations and some weights are rounded to 8 bits, which costs what it costs everywhere: a few per cent."""
    path, model = loaded(tmp_path, "tuned", types=kind, width=256, hidden=512, heads=4, kv_heads=2)
    expected = logits(path, TOKENS)
    found = all_scores(model.session(128), TOKENS)
    error = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert np.median(error) < 0.06
    exact = all_scores(Model.load(path, weights="exact").session(128), TOKENS)
    assert np.abs(exact - expected).max() < EXACT * np.abs(expected).max()


def test_formats_may_differ_within_a_layer(tmp_path):
    path, model = loaded(tmp_path, "tuned", types={"attn_v": "Q8_0", "attn": "Q4_0", "ffn_up": "Q8_0", "": "Q4_1"})
    expected = logits(path, TOKENS)
    found = all_scores(model.session(128), TOKENS)
    assert np.median(np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)) < 0.05


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("k, v", [("f16", "f16"), ("q8_0", "q4_0"), ("int4", "int4")])
def test_one_by_one_is_the_same_as_a_block(tmp_path, threads, k, v):
    _, model = loaded(tmp_path, threads=threads)
    tolerance = EXACT if k == "f16" else 0.1
    one = model.session(128, k, v)
    block = model.session(128, k, v)
    for length in (1, 2, 3, 5, 8, 13, 21):
        tokens = TOKENS[one.length : one.length + length]
        together = block.prefill(tokens).copy()
        for token in tokens:
            alone = one.step(token)
        assert np.abs(alone - together).max() < tolerance * np.abs(together).max()
        assert one.length == block.length


@pytest.mark.parametrize("k, v", [("q8_0", "q8_0"), ("f16", "q8_0"), ("q8_0", "f16")])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_stored_turned_and_centred_is_read_as_it_was(tmp_path, architecture, k, v):
    path, model = loaded(tmp_path, architecture=architecture, heads=4, kv_heads=2, width=128, head_dim=32)
    expected = logits(path, TOKENS)
    found = all_scores(model.session(128, k, v), TOKENS)
    error = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert error.max() < 0.06


def test_roll_back_leaves_nothing_behind(tmp_path):
    _, model = loaded(tmp_path)
    session, other = model.session(128), model.session(128)
    wanted = other.prefill(TOKENS[:50]).copy()
    session.prefill(TOKENS[:30])
    session.prefill(TOKENS[60:75])
    session.truncate(30)
    found = session.prefill(TOKENS[30:50])
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_a_window_forgets_whole_segments(tmp_path):
    path, model = loaded(tmp_path, metadata={"attention.sliding_window": 100}, context=1024)
    tokens = [int(token) for token in np.random.default_rng(8).integers(3, 280, 640)]
    expected = logits(path, tokens)
    session = model.session(1024)
    session.prefill(tokens[:600])
    for position in range(600, 640):
        found = session.step(tokens[position])
        assert np.abs(found - expected[position]).max() < EXACT * np.abs(expected).max()
    assert session.cache.start > 128


def test_forks_go_their_own_ways(tmp_path):
    _, model = loaded(tmp_path)
    session = model.session(128)
    session.prefill(TOKENS[:40])
    fork = session.fork()
    one, other = session.prefill(TOKENS[40:50]).copy(), fork.prefill(TOKENS[50:60]).copy()
    for tokens, found in ((TOKENS[:50], one), (TOKENS[:40] + TOKENS[50:60], other)):
        np.testing.assert_allclose(found, model.session(128).prefill(tokens), atol=2e-3)
    assert session.cache.segments[0].storage is fork.cache.segments[0].storage


def test_a_full_context_is_refused_and_nothing_is_lost(tmp_path):
    _, model = loaded(tmp_path)
    session = model.session(32)
    with pytest.raises(CacheFullError, match="no room in a context of 32 tokens for 0 and 33 more"):
        session.prefill(TOKENS[:33])
    assert session.length == 0
    session.prefill(TOKENS[:32])
    with pytest.raises(CacheFullError):
        session.step(5)
    assert session.length == 32


@pytest.mark.parametrize("tokens", [[], [-1], [5, 100000], [1.5], [[1, 2]]])
def test_what_is_no_prompt_is_refused(tmp_path, tokens):
    _, model = loaded(tmp_path)
    session = model.session(32)
    with pytest.raises(ProblemError):
        session.prefill(tokens)
    assert session.length == 0
    for token in (100000, -1, 1.5, "a"):
        with pytest.raises(ProblemError):
            session.step(token)


def test_what_cannot_be_is_refused_before_it_is_allocated(tmp_path, monkeypatch):
    path, model = loaded(tmp_path)
    monkeypatch.setattr("lowbit.runtime.memory.available_bytes", lambda: 1 << 22)
    with pytest.raises(FitError, match="does not fit in memory"):
        model.session(1 << 20)
    model.session(64)
    with pytest.raises(ProblemError, match="unknown cache type 'q9'"):
        model.session(32, "q9")
    with pytest.raises(ProblemError, match="weights"):
        Model.load(path, weights="half")
    with pytest.raises(ModelError):
        Model.load(tmp_path / "absent.gguf")


def test_an_interrupted_pass_is_forgotten(tmp_path, monkeypatch):
    _, model = loaded(tmp_path)
    session = model.session(64)
    wanted = model.session(64).prefill(TOKENS[:20]).copy()
    session.prefill(TOKENS[:10])
    forward = next(iter(session._forward.values()))

    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(forward), "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.prefill(TOKENS[30:50])
    assert session.length == 10
    monkeypatch.undo()
    np.testing.assert_allclose(session.prefill(TOKENS[10:20]), wanted, atol=2e-3)


def test_fallback_is_said_once(tmp_path):
    path = write_model(tmp_path / "model.gguf", types="Q8_0", width=96, heads=3, kv_heads=1)
    with pytest.warns(UserWarning, match="no database for") as told:
        model = Model.load(path)
        model.session(32)
        model.session(32)
    assert len(told) == 2  # the matrices, then attention


@pytest.mark.parametrize("pause", ["begin", "run"])
def test_what_was_counted_before_an_interrupt_is_forgotten(tmp_path, monkeypatch, pause):
    """Even one that is heeded as soon as tokens are counted."""
    _, model = loaded(tmp_path)
    session, other = model.session(128), model.session(128)
    session.prefill(TOKENS[:5])
    other.prefill(TOKENS[:5])
    part = session.cache if pause == "begin" else session._forward_pass(1, "last")
    done = getattr(part, pause)

    def interrupted(*given):
        done(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(part, pause, interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.step(TOKENS[9])
    assert session.length == 5
    np.testing.assert_array_equal(session.step(TOKENS[5]), other.step(TOKENS[5]))
