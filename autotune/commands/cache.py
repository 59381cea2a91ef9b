"""`autotune cache`: the compiled kernels that are kept for the next start."""

from __future__ import annotations

import click

from ..options import json_option
from ..output import print_facts, print_json


@click.group()
def cache() -> None:
    """Look at or delete the compiled kernels that are kept for the next start.

    \b
    They lie in the user's cache directory, or where LOWBIT_CACHE says; with
    LOWBIT_CACHE=off none are kept.

    \b
    Example:
      autotune cache info
    """


@cache.command()
@json_option
def info(as_json: bool) -> None:
    """Show where compiled kernels are kept, how many there are, and their size.

    \b
    Example:
      autotune cache info --json
    """
    from ...kernels.cpu.code_files import LIMIT_BYTES, directory, stored

    path, files = directory(), stored()
    facts = {
        "directory": str(path) if path else None,
        "files": len(files),
        "bytes": sum(each.size_bytes for each in files),
        "limit_bytes": LIMIT_BYTES,
    }
    if as_json:
        print_json(facts)
    else:
        print_facts("Compiled kernels", facts | {"directory": facts["directory"] or "none: LOWBIT_CACHE is off"})


@cache.command()
@json_option
def clear(as_json: bool) -> None:
    """Delete the compiled kernels. They are compiled anew when they are needed.

    \b
    Example:
      autotune cache clear
    """
    from ...kernels.cpu.code_files import clear as delete
    from ...kernels.cpu.code_files import directory

    path, (deleted, left) = directory(), delete()
    for each in left:
        click.echo(f"warning: not deleted: {each}", err=True)
    if as_json:
        print_json({"directory": str(path) if path else None, "deleted": deleted})
    else:
        click.echo(f"{deleted} compiled kernels deleted")
