"""`autotune db`: look into a database without changing it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ...kernels.errors import NoWinnerError
from ..options import database_for_reading, database_option, json_option
from ..output import Result, length_name, print_facts, print_json, print_phases, print_winners


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
        print_facts(str(path), _readable(facts))


def _readable(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The same facts under headings for people; what is empty is left out."""
    shown: dict[str, Any] = {"size": f"{facts['size_bytes'] / 1024:,.0f} KiB", "schema": facts["schema_version"]}
    shown |= {f"{count} stored".replace("_", " "): number for count, number in facts["counts"].items() if number}
    for number, device in enumerate(facts["devices"], 1):
        known = (device["name"], device["fingerprint"])
        shown[f"device {number}"] = "\n".join(each for each in known if each)
    shown |= {f"toolchain {number}": name for number, name in enumerate(facts["toolchains"], 1)}
    shown |= {f"measurements, {status}": number for status, number in facts["statuses"].items()}
    shown |= {f"winners, {provenance}": number for provenance, number in facts["provenances"].items()}
    for run in facts["runs"]:
        when = " to ".join(each for each in (run["started"], run["finished"]) if each)
        shown[f"run {run['id']}"] = f"{run['command']}\n{run['status']}, {when}"
    return shown


@db.command()
@database_option
@click.option("--device", metavar="FINGERPRINT", help="Only this device's winners.")
@click.option("--problem", metavar="KEY", help="Only this problem's winners, such as 'attend h32/8 d64 q1 w8a8'.")
@json_option
def winners(database: Path | None, device: str | None, problem: str | None, as_json: bool) -> None:
    """List the stored winners and the context lengths each is for, and say why the layout changes or does not.

    \b
    Example:
      autotune db winners --db lowbit.db --problem 'attend h32/8 d64 q1 w8a8'
    """
    from ...db.store import Store
    from ..phases import phases_in

    path = database_for_reading(database)
    with Store.open(path, mode="read") as store:
        found = store.winners(device, problem)
        phases = phases_in(store, found)
    if as_json:
        rows = [{**asdict(each), "speedup": each.speedup} for each in found]
        print_json({"db": str(path), "winners": rows, "phases": [{"device": p.device, **p.as_dict()} for p in phases]})
        return
    if not found:
        asked = " ".join(each for each in (problem and f"problem {problem!r}", device and f"device {device!r}") if each)
        raise NoWinnerError(f"{path} holds no winners{f' for {asked}' if asked else ''}")
    results = [
        Result(
            each.problem,
            f"{each.tokens} {length_name(each.problem)} ({each.tokens_from} to {each.tokens_to or 'any'})",
            each.candidate,
            each.provenance,
            each.predicted_us,
            each.median_us,
            each.speedup,
            each.bandwidth_share,
            len(each.tied),
        )
        for each in found
    ]
    print_winners(str(path), results)
    print_phases(phases)
