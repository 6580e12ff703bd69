"""Tokens that a model generates: with kept keys and values, over the end of the window, and how they are drawn."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Inputs, Outputs
from scaleflow.interfaces.sampling import Sampling


def make_gpt(window: int, vocabulary: int = 20, **arguments: Any) -> Any:
    """A GPT whose weights are large enough for its predictions to differ."""
    from scaleflow.model import make_model
    from scaleflow.model.gpt import build

    tokens = Inputs((window,), "int32", vocabulary=vocabulary)
    following = Outputs("classification", (window, vocabulary))
    net = make_model(lambda i, o: build(i, o, **arguments), tokens, following)
    random = np.random.default_rng(0)
    for weight in net.weights:
        weight.assign(weight + random.normal(0, 0.3, weight.shape))
    return net


def compare() -> dict[str, Any]:
    """Logits with and without kept keys and values, of texts that grow, jump, and are longer than the window."""
    from scaleflow.model.gpt import CachedGpt, WholeWindow, count_blocks, generate_tokens

    net = make_gpt(8, width=16, heads=2, blocks=2, dropout=0.1)
    net.get_layer("block1_attention")._query_dense.enable_lora(2)
    net.get_layer("block1_attention")._query_dense.lora_kernel_b.assign_add(
        np.full(net.get_layer("block1_attention")._query_dense.lora_kernel_b.shape, 0.1, np.float32)
    )
    cached, whole = CachedGpt(net, 8), WholeWindow(net, 8)
    random = np.random.default_rng(1)
    text, other = random.integers(0, 20, 8).tolist(), random.integers(0, 20, 8).tolist()
    asked = [text[:1], text[:2], text[:5], text[:6], text[:8], other[:3], other[:4], text[:4], text[:3], text[:3]]
    differences = [float(np.abs(cached(each) - whole(each)).max()) for each in asked]
    sampling = Sampling(tokens=30, temperature=0.7, top_k=10, top_p=0.9, seed=3)
    generated = [list(generate_tokens(model, text[:3], 8, sampling)) for model in (cached, whole)]
    long = [list(generate_tokens(model, text * 3, 8, sampling)) for model in (CachedGpt(net, 8), whole)]
    narrow = make_gpt(1, width=4, heads=1, blocks=1)
    least = [list(generate_tokens(model, [1], 1, sampling)) for model in (CachedGpt(narrow, 1), WholeWindow(narrow, 1))]
    return {
        "differences": differences,
        "size": float(np.abs(whole(text)).max()),
        "generated": generated,
        "long": long,
        "least": least,
        "traces": cached._advance.experimental_get_tracing_count(),
        "blocks": count_blocks(net),
    }


def test_logits_with_kept_keys_and_values_are_those_of_the_whole_window(isolated: Callable[..., Any]) -> None:
    found = isolated(compare)
    assert found["blocks"] == 2
    assert max(found["differences"]) < 1e-5 * max(1, found["size"])
    for name in ("generated", "long", "least"):
        with_cache, without = found[name]
        assert with_cache == without
        assert len(with_cache) == 30
    assert found["traces"] == 2  # of a whole window and of one place


def windows() -> list[list[int]]:
    """What a model is asked for, when the window has four places."""
    from scaleflow.model.gpt import generate_tokens

    asked = []

    def count(tokens: Any) -> np.ndarray[Any, Any]:
        asked.append(list(tokens))
        return np.eye(20, dtype=np.float32)[(tokens[-1] + 1) % 20]

    assert list(generate_tokens(count, [1, 2], 4, Sampling(tokens=6, temperature=0.0))) == [3, 4, 5, 6, 7, 8]
    return asked


def test_a_full_window_moves_on_by_half(isolated: Callable[..., Any]) -> None:
    assert isolated(windows) == [[1, 2], [1, 2, 3], [1, 2, 3, 4], [4, 5], [4, 5, 6], [4, 5, 6, 7]]


def draw() -> dict[str, Any]:
    from scaleflow.model.gpt import choose_token

    logits = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))

    def shares(unused: tuple[int, ...] = (), **options: Any) -> list[float]:
        random, sampling = np.random.default_rng(0), Sampling(**options)
        drawn = [choose_token(logits, sampling, random, unused) for _ in range(4000)]
        return (np.bincount(drawn, minlength=4) / 4000).tolist()

    return {
        "as predicted": shares(),
        "top_k": shares(top_k=2),
        "top_p": shares(top_p=0.75),
        "more": shares(top_p=0.76),
        "cold": shares(temperature=0.5),
        "most probable": shares(temperature=0.0),
        "unused": shares(unused=(0,)),
        "all": shares(top_k=100),
    }


def test_tokens_are_drawn_as_asked(isolated: Callable[..., Any]) -> None:
    found = isolated(draw)
    wanted = {
        "as predicted": [0.5, 0.25, 0.15, 0.1],
        "top_k": [2 / 3, 1 / 3, 0, 0],
        "top_p": [2 / 3, 1 / 3, 0, 0],
        "more": [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0],
        "cold": [0.25 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345, 0.01 / 0.345],
        "most probable": [1, 0, 0, 0],
        "unused": [0, 0.5, 0.3, 0.2],
        "all": [0.5, 0.25, 0.15, 0.1],
    }
    for name, shares in wanted.items():
        assert found[name] == pytest.approx(shares, abs=0.03), name
        assert [share == 0 for share in found[name]] == [share == 0 for share in shares], name


def other_models(folder: str) -> dict[str, Any]:
    """Models that are no `gpt`: a causal one is used, one that looks ahead is refused."""
    import keras

    from scaleflow.model.export import Parts, write_saved_model
    from scaleflow.model.gpt import WholeWindow, load_next_token, make_next_token

    def build(padding: str) -> Any:
        raw = keras.Input((8,), dtype="int32")
        x = keras.layers.Conv1D(16, 3, padding=padding)(keras.layers.Embedding(20, 8)(raw))
        return keras.Model(raw, keras.layers.Dense(20)(x))

    causal = build("causal")
    with pytest.raises(ConfigError) as refused:
        make_next_token(build("same"), 8, "int32")
    causal.save(f"{folder}/model.keras")
    tokens, following = Inputs((8,), "int32", vocabulary=20), Outputs("classification", (8, 20))
    write_saved_model(causal, Parts(causal, {}, tokens, "float32"), following, Path(f"{folder}/saved_model"), {})
    with pytest.raises(ConfigError) as missing:
        load_next_token(Path(f"{folder}/none.keras"), 8, "int32")
    text = [3, 1, 4]
    loaded = [load_next_token(Path(f"{folder}/{name}"), 8, "int32")(text) for name in ("model.keras", "saved_model")]
    wanted = WholeWindow(causal, 8)(text)
    return {
        "refused": str(refused.value),
        "missing": str(missing.value),
        "difference": max(float(np.abs(each - wanted).max()) for each in loaded),
    }


def test_other_models_are_used_if_they_do_not_look_ahead(isolated: Callable[..., Any], tmp_path: Path) -> None:
    found = isolated(other_models, str(tmp_path))
    assert found["refused"].startswith("the run's model looks at later tokens")
    assert found["missing"].startswith("the model of the run cannot be loaded: ")
    assert found["difference"] < 1e-5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tokens": 0}, "tokens=0: expected a whole number, at least 1"),
        ({"tokens": 2.5}, "tokens=2.5: expected a whole number, at least 1"),
        ({"temperature": -0.1}, "temperature=-0.1: expected a number, at least 0"),
        ({"temperature": float("inf")}, "temperature=inf: expected a number, at least 0"),
        ({"top_k": 0}, "top_k=0: expected a whole number, at least 1"),
        ({"top_p": 0.0}, "top_p=0.0: expected a number above 0, at most 1"),
        ({"top_p": 1.1}, "top_p=1.1: expected a number above 0, at most 1"),
        ({"top_p": float("nan")}, "top_p=nan: expected a number above 0, at most 1"),
        ({"seed": -1}, "seed=-1: expected a whole number, at least 0"),
    ],
)
def test_values_out_of_their_range_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Sampling(**values).check()
    assert str(refused.value) == message


def measure() -> tuple[float, float]:
    """Seconds of CPU of 500 tokens, and of 500 calls of the model on the whole window, the least of a few rounds."""
    from scaleflow.model.gpt import CachedGpt, generate_tokens

    net = make_gpt(512, 256)
    cached, padded = CachedGpt(net, 512), np.zeros([1, 512], np.int32)
    list(generate_tokens(cached, [1, 2], 512, Sampling(tokens=3)))
    np.asarray(net(padded))
    found = []
    for _ in range(3):
        began = time.process_time()
        list(generate_tokens(cached, [1, 2], 512, Sampling(tokens=500)))
        middle = time.process_time()
        for _ in range(5):
            np.asarray(net(padded))
        found.append((middle - began, 100 * (time.process_time() - middle)))
    return min(each[0] for each in found), min(each[1] for each in found)


@pytest.mark.slow
def test_500_tokens_take_less_than_a_tenth_of_500_whole_windows(isolated: Callable[..., Any]) -> None:
    tokens, calls = isolated(measure, timeout=300)
    assert calls > 10 * tokens
