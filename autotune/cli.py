"""The `autotune` command."""

from __future__ import annotations

import io
import sys

from .commands.bench import bench
from .commands.cache import cache
from .commands.calibrate import calibrate
from .commands.database import db
from .commands.devices import devices
from .commands.explain import explain
from .commands.generate import generate
from .commands.kernel import kernel
from .commands.main import autotune
from .commands.memory import memory
from .commands.quality import quality

for _command in (bench, cache, calibrate, db, devices, explain, generate, kernel, memory, quality):
    autotune.add_command(_command)


def main() -> None:
    """Entry point of the installed `autotune` command; exits the process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a table's µ must not end the command where ASCII is all there is
    autotune(prog_name="autotune")
