"""`autotune db`: look into a database without changing it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from ...kernels.candidate import Candidate
from ...kernels.errors import LowbitError
from ..options import database_for_reading, database_option, json_option
from ..output import microseconds, percent, print_facts, print_json, print_table, times


@click.group()
def db() -> None:
    """Look into a tuned database. Nothing is written to it.

    \b
    Example:
      autotune db winners --db lowbit.db
    """


@db.command()
@database_option
@json_option
def info(database: Path | None, as_json: bool) -> None:
    """Show a database's schema version, devices and row counts.

    \b
    Example:
      autotune db info --db lowbit.db
    """
    from ...db.store import Store

    path = database_for_reading(database)
    with Store.open(path, mode="read") as store:
        facts = store.info()
    if as_json:
        print_json({"db": str(path), **facts})
    else:
        print_facts(str(path), facts)


@db.command()
@database_option
@click.option("--device", metavar="FINGERPRINT", help="Only this device's winners.")
@click.option("--problem", metavar="KEY", help="Only this problem's winners, such as 'attend h32/8 d64 q1 w8a8'.")
@json_option
def winners(database: Path | None, device: str | None, problem: str | None, as_json: bool) -> None:
    """List the stored winners and the context lengths each is for.

    \b
    Example:
      autotune db winners --db lowbit.db --problem 'attend h32/8 d64 q1 w8a8'
    """
    from ...db.store import Store

    path = database_for_reading(database)
    with Store.open(path, mode="read") as store:
        found = store.winners(device, problem)
    if as_json:
        print_json({"db": str(path), "winners": [{**asdict(each), "speedup": each.speedup} for each in found]})
        return
    columns = ("problem", ">tokens", ">for", "layout", "provenance", ">measured µs", ">vs row-major", ">of bandwidth")
    rows = [
        (
            each.problem,
            each.tokens,
            f"{each.tokens_from}-{each.tokens_to or ''}",
            _layout(each.candidate),
            each.provenance,
            microseconds(each.median_us),
            times(each.speedup),
            percent(each.bandwidth_share),
        )
        for each in found
    ]
    print_table(str(path), columns, rows)


def _layout(candidate: str) -> str:
    """The layouts of a stored candidate; its whole name if a packing that it uses is not registered here."""
    try:
        return Candidate.parse(candidate).layout
    except LowbitError:
        return candidate
