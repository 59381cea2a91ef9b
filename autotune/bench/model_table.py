"""The table of a comparison of whole models, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from ...runtime.cache_types import CacheTypes
from ..output import percent, print_facts, print_table, times

COLUMNS = ("test", "cache", ">depth", "implementation", ">tokens/s", ">spread", ">lowbit is faster")


def print_models(report: Mapping[str, Any]) -> None:
    """Print what `lowbit.autotune.bench.model_outcome.ModelOutcome.as_dict` says."""
    device = report["device"]
    facts = {"model": report["model"], "device": device.get("description", ""), "threads": report["threads"]}
    print_facts("Bench", {**facts, **{f"version.{name}": text for name, text in report["peers"].items()}})
    own = {_where(row): row["tokens_per_s"] for row in report["rows"] if row["impl"] == "lowbit"}
    print_table("Tokens per second", COLUMNS, [_cells(row, own.get(_where(row))) for row in report["rows"]])
    for name, ratio in report["model_rss_ratio"].items():
        own_mib, peer_mib = (report["model_rss_bytes"][impl][name] / 2**20 for impl in ("lowbit", "llama_cpp"))
        click.echo(f"model and cache with {name}: {own_mib:,.0f} MiB, {times(ratio)} llama.cpp's {peer_mib:,.0f} MiB")


def _where(row: Mapping[str, Any]) -> tuple[object, ...]:
    return row["cache_type_k"], row["cache_type_v"], row["depth"], row["test"]


def _cells(row: Mapping[str, Any], own: float | None) -> tuple[object, ...]:
    speed = row["tokens_per_s"]
    name = row["impl"] + (", no flash attention" if row.get("flash_attention") is False else "")
    return (
        row["test"],
        CacheTypes(row["cache_type_k"], row["cache_type_v"]).name,
        f"{row['depth']:,}",
        name,
        row["status"] if speed is None else f"{speed:,.1f}",
        percent(row["spread"]),
        None if speed is None or own is None or row["impl"] == "lowbit" else times(own / speed),
    )
