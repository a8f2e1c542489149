"""The command ``kvfs``: one module a verb, each with a click command named ``command``."""

from __future__ import annotations

import importlib
import sys
import traceback
from typing import Any, NoReturn

import click

from kvfs import __version__, errors
from kvfs.cli.output import guarded_output

_VERBS = (
    "mount",
    "umount",
    "status",
    "doctor",
    "verify",
    "gc",
    "evict",
    "prefetch",
    "pin",
    "unpin",
    "put",
    "get",
    "cat",
    "simulate",
)


class _Verbs(click.Group):
    """Imports a verb only when it is asked for: ``kvfs status`` need not load what ``kvfs mount`` needs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        command = importlib.import_module(f"kvfs.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # click would begin with an empty line
            raise click.Abort from None

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in errors.exit_codes()])


@click.command(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="kvfs %(version)s")
def _kvfs() -> None:
    """The KV cache of language models as a filesystem in hugepage DRAM.

    \b
    sudo kvfs mount /mnt/kv --pool 64G
    cp -r old-cache /mnt/kv; ls -lh /mnt/kv; df -h /mnt/kv
    kvfs status /mnt/kv
    sudo kvfs umount /mnt/kv

    Every option can also be given as KVFS_OPTION in the environment (sudo drops it unless told otherwise) or
    as a key in /etc/kvfs.toml, or in /etc/kvfs/mnt-kv.toml for a mount at /mnt/kv alone. A flag wins over the
    environment, the environment over the file, the file over the default; the status of a mount shows where
    each value came from.
    """


def main() -> NoReturn:
    """The command line ``kvfs``."""
    sys.exit(run(_kvfs, "kvfs"))


def run(command: click.Command, name: str) -> int:
    """Runs a command line; returns its exit code. A user's mistake is one line on stderr, a bug a trace."""
    try:
        with guarded_output():
            command.main(standalone_mode=False, prog_name=name)
    except errors.KvfsError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return errors.UsageError.exit_code
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        verb = context.command_path if context is not None else name
        message = error.format_message().rstrip(".")
        print(f"{name}: {message[:1].lower()}{message[1:]}: see {verb} --help", file=sys.stderr)
        return errors.UsageError.exit_code
    except (click.Abort, KeyboardInterrupt):
        print(f"{name}: interrupted", file=sys.stderr)
        return errors.EXIT_INTERRUPTED
    except Exception:
        traceback.print_exc()
        return errors.EXIT_BUG
    return errors.EXIT_OK
