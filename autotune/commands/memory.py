"""`autotune memory`: what a context takes, and how long a context fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ...runtime.cache_types import FORMATS, CacheTypes
from ..options import json_option
from ..output import print_facts, print_json, print_table
from ..parameters import PARAMETERS, WEIGHT_BITS
from ..sizes import Size

if TYPE_CHECKING:
    from ...runtime.memory import Need
    from ..decoder_shapes import Decoder

PAIRS = tuple(CacheTypes(*names) for names in (("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "q4_0"), ("q4_0", "q4_0")))
"""Types of keys and values that are listed."""


@click.command()
@click.option(
    "--model",
    default="smollm2-135m",
    show_default=True,
    metavar="NAME|FILE",
    help=f"Preset ({', '.join(PARAMETERS)}) or .gguf file.",
)
@click.option(
    "-c", "--context", type=click.IntRange(min=1, max=1 << 24), default=8192, show_default=True, help="Tokens."
)
@click.option(
    "--budget",
    type=Size(),
    metavar="SIZE",
    help="Memory to fit into, decimal (24GB) or binary (24GiB).  [default: what is available here]",
)
@click.option(
    "--weights",
    type=click.Choice(tuple(WEIGHT_BITS)),
    help="Type of the weights.  [default: the file's own; q4_0 for presets]",
)
@click.option(
    "--draft-layers",
    type=click.IntRange(min=0, max=1 << 12),
    default=0,
    show_default=True,
    help="Layers whose hidden states are kept in ring buffers for a drafter.",
)
@json_option
def memory(model: str, context: int, budget: int | None, weights: str | None, draft_layers: int, as_json: bool) -> None:
    """Work out what a model and a context take, and how long a context fits.

    For each type of keys and values: weights, cache with its scales, ring buffers and scratch, from the model's real
    shape. Layers without keys and values take none, and layers with a sliding window only the window.

    \b
    Example:
      autotune memory --model qwen3.6-27b --context 200000 --budget 24GB
    """
    from ...runtime.available import available_bytes
    from ..decoder_shapes import decoder_named

    decoder = decoder_named(model)
    room = available_bytes() if budget is None else budget
    report = _report(decoder, context, room, decoder.weight_bytes(weights), weights, draft_layers)
    if as_json:
        print_json(report)
    else:
        _print(report, decoder)


def _report(
    decoder: Decoder, context: int, budget: int, weight_bytes: int, weights: str | None, draft_layers: int
) -> dict[str, Any]:
    from ...runtime.memory import arithmetic, largest_context, need

    shape, rows = decoder.shape, []
    for types in PAIRS:
        k, v = FORMATS[types.k], FORMATS[types.v]
        found = need(shape, context, k, v, weight_bytes, draft_layers)
        rows.append(
            {
                "k": types.k,
                "v": types.v,
                "bytes_per_token": shape.token_bytes(k, v),
                **_sizes(found),
                "fits": found.total <= budget,
                "largest_context": largest_context(shape, budget, k, v, weight_bytes, draft_layers),
                "arithmetic": arithmetic(shape, context, k, v),
            }
        )
    return {
        "model": shape.name,
        "layers": shape.layers,
        "layers_with_kv": shape.cached_layers,
        "caches": [vars(cache) for cache in shape.caches],
        "parameters": decoder.parameters,
        "weights": weights or ("file" if decoder.weights is not None else "q4_0"),
        "state_known": shape.state_bytes is not None,
        "context": context,
        "budget_bytes": budget,
        "rows": rows,
    }


def _sizes(found: Need) -> dict[str, int]:
    return {
        "weights_bytes": found.weights,
        "codes_bytes": found.codes,
        "scales_bytes": found.scales,
        "cache_bytes": found.cache,
        "state_bytes": found.state,
        "ring_bytes": found.rings,
        "scratch_bytes": found.scratch,
        "total_bytes": found.total,
    }


def _print(report: dict[str, Any], decoder: Decoder) -> None:
    from ...runtime.memory import shown_bytes

    layers = f"{report['layers']}, of which {report['layers_with_kv']} keep keys and values"
    if not report["state_known"]:
        layers += "; the size of the others' states is not known and not counted"
    facts = {
        "layers": layers,
        "keys and values": "; ".join(
            f"{each.layers} layers × {each.kv_heads} heads × {each.head_dim} channels"
            + (f", window {each.window}" if each.window else "")
            for each in decoder.shape.caches
        ),
        "weights": f"{report['parameters']:,} in {_weights(report['weights'])}",
        "context": f"{report['context']:,} tokens",
        "budget": shown_bytes(report["budget_bytes"]),
        "arithmetic": f"{report['rows'][0]['arithmetic']} in f16",
    }
    print_facts(f"Memory of {report['model']}", facts)
    rows = [
        (
            CacheTypes(row["k"], row["v"]).name,
            *(
                shown_bytes(row[f"{name}_bytes"]) if row[f"{name}_bytes"] else "–"
                for name in ("weights", "codes", "scales", "state", "ring", "scratch", "total")
            ),
            "yes" if row["fits"] else "no",
            _longest(row["largest_context"]),
        )
        for row in report["rows"]
    ]
    columns = ("K/V", ">weights", ">codes", ">scales", ">state", ">rings", ">scratch", ">total", "fits", ">most tokens")
    print_table("By type of keys and values", columns, rows)


def _weights(name: str) -> str:
    return "the file's own types, as they are decoded with" if name == "file" else name


def _longest(context: int | None) -> str:
    if context is None:
        return "any"
    return f"{context:,}" if context else "none"
