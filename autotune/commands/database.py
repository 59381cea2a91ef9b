"""`autotune db`: look into a database without changing it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...kernels.errors import DeviceError, NoWinnerError
from ..options import database_for_reading, database_option, json_option
from ..output import Result, length_name, print_facts, print_json, print_phases, print_winners

if TYPE_CHECKING:
    from ...db.records import Winner


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
@click.option(
    "--device",
    metavar="NAME",
    help="Only winners of such devices: a board's name ('RTX 3060'), an architecture or instruction set (sm_86), cpu "
    "for every CPU, or a fingerprint.",
)
@click.option("--problem", metavar="KEY", help="Only this problem's winners, such as 'attend h32/8 d64 q1 w8a8'.")
@json_option
def winners(database: Path | None, device: str | None, problem: str | None, as_json: bool) -> None:
    """List each device's winners and the context lengths each is for, and say why the layout changes or does not.

    \b
    Example:
      autotune db winners --db lowbit.db --problem 'attend h32/8 d64 q1 w8a8'
      autotune db winners --db lowbit.db --device 'RTX 3060'
    """
    from ...db.described import long_names, short_names
    from ...db.store import Store
    from ..phases import phases_in

    path = database_for_reading(database)
    with Store.open(path, mode="read") as store:
        devices = store.devices()
        meant = [each for each in devices if device is None or _is_called(device, each, devices[each])]
        found = [each for each in store.winners(problem=problem) if each.device in meant]
        phases = phases_in(store, found)
    names = short_names(devices)
    if as_json:
        rows = [{**asdict(each), "speedup": each.speedup} for each in found]
        told = {
            "db": str(path),
            "devices": {each: names[each] for each in meant},
            "winners": rows,
            "phases": [{"device": p.device, **p.as_dict()} for p in phases],
        }
        print_json(told)
        return
    if not found:
        asked = " ".join(each for each in (problem and f"problem {problem!r}", device and f"device {device!r}") if each)
        others = f"; its devices are {', '.join(names.values())}" if device and names and not meant else ""
        raise NoWinnerError(f"{path} holds no winners{f' for {asked}' if asked else ''}{others}")
    headings = long_names(devices)
    for fingerprint in meant:
        own = [_result(each) for each in found if each.device == fingerprint]
        if own:
            print_winners(f"{path}: {headings[fingerprint]}", own)
    print_phases(phases, names)


def _is_called(asked: str, fingerprint: str, description: Mapping[str, Any]) -> bool:
    """Whether somebody who asks for ``asked`` means this device."""
    from ...costmodel.gpu import gpu_named
    from ...db.described import GPU, chip_of, isa_of

    isa, chip = isa_of(fingerprint, description), chip_of(fingerprint, description)
    if asked == "cpu":
        return not isa.startswith(GPU)
    if asked in (fingerprint, isa) or _plain(asked) == _plain(chip):
        return True
    try:
        board = gpu_named(asked)
    except DeviceError:
        return False
    return board.fingerprint == fingerprint or board.name == chip


def _plain(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def _result(winner: Winner) -> Result:
    return Result(
        winner.problem,
        f"{winner.tokens} {length_name(winner.problem)} ({winner.tokens_from} to {winner.tokens_to or 'any'})",
        winner.candidate,
        winner.provenance,
        winner.predicted_us,
        winner.median_us,
        winner.speedup,
        winner.bandwidth_share,
        len(winner.tied),
    )
