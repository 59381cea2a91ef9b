"""The command group: every error becomes one line on stderr and an exit status."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

import click
from click.core import ParameterSource

from ..kernels.errors import LowbitError

INTERRUPTED = 130
PIPE_CLOSED = 141
_WRITE_FAILURES = (errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EBADF, getattr(errno, "EDQUOT", errno.ENOSPC))
"""What writing to a stream that names no file fails with."""

EXIT_STATUSES = """\
\b
Exit status:
  0    done
  1    any other error
  2    a bad option, problem or layout
  3    an unknown device, or one that this machine lacks
  4    nothing could be compiled
  5    the database cannot be opened or written
  6    nothing in the database answers the question, or tuning found no winner
  7    an unknown model, or a model file that cannot be read
  8    the machine was too noisy to measure on
  9    a kernel of your own is declared wrongly, fails, or differs from its reference
  10   machine code in a database that nobody vouched for, or that was changed
  11   more tokens than the context has room for
  12   a saved cache that cannot be read, or is another model's
  13   a context that does not fit in memory
  130  interrupted; what was measured is kept
  141  the reader of the output went away
"""


class Commands(click.Group):
    """A click group whose failures are one line, never a traceback, and whose own options go with no subcommand."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run and exit. Only an error in this program itself gets a traceback."""
        extra["standalone_mode"] = False
        if sys.stdout is None:
            # Its descriptor is free: the next file that is opened would get it.
            sys.exit(_fail("standard output is closed", 1))
        try:
            status = super().main(*args, **extra)
        except click.ClickException as error:
            status = _fail(error.format_message(), error.exit_code)
        except LowbitError as error:
            status = _fail(str(error), error.exit_status)
        except (click.Abort, KeyboardInterrupt) as interrupt:
            # click turns the interrupt into an Abort; what it was says whether anything is lost.
            status = _fail(str(interrupt.__cause__ or interrupt) or "interrupted", INTERRUPTED)
        except OSError as error:
            if error.filename is not None:
                status = _fail(f"{error.filename}: {error.strerror}", 1)
            elif error.errno in _WRITE_FAILURES:
                _give_output_up()
                status = _fail(f"the output cannot be written: {error.strerror}", 1)
            else:
                raise
        sys.exit(status if isinstance(status, int) else 0)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command and write out what it printed, while a closed pipe can still be told from success."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            _give_output_up()
            ctx.exit(PIPE_CLOSED)
        return result


def refuse_own_options(ctx: click.Context) -> None:
    """Refuse options written before a subcommand: they belong to the main job and would be ignored.

    Raises
    ------
    click.UsageError
        Naming the first such option.
    """
    for parameter in ctx.command.params:
        if parameter.name and ctx.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"{parameter.opts[0]} stands before '{ctx.invoked_subcommand}', where it has no effect: write it after"
            )


def _give_output_up() -> None:
    """Python flushes stdout once more when it exits; that must not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, status: int) -> int:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    return status
