"""The command ``kvfs``: one module a verb, each with a click command named ``command``."""

from __future__ import annotations

import importlib
import sys
import traceback
from typing import Any, NoReturn

import click

from kvfs import __version__, errors

_VERBS = ("mount", "umount", "status", "doctor", "verify", "gc", "evict", "prefetch")


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
    as a key in /etc/kvfs.toml. A flag wins over the environment, the environment over the file, the file over
    the default; the status of a mount shows where each value came from.
    """


def _fail(message: str, code: int) -> NoReturn:
    print(f"kvfs: {message}", file=sys.stderr)
    sys.exit(code)


def main() -> NoReturn:
    """Runs the command line and exits. A user's mistake is one line on stderr, a bug a trace."""
    try:
        _kvfs.main(standalone_mode=False, prog_name="kvfs")
    except errors.KvfsError as error:
        _fail(str(error), error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        sys.exit(errors.UsageError.exit_code)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        verb = context.command_path if context is not None else "kvfs"
        message = error.format_message().rstrip(".")
        _fail(f"{message[:1].lower()}{message[1:]}: see {verb} --help", errors.UsageError.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _fail("interrupted", errors.EXIT_INTERRUPTED)
    except Exception:
        traceback.print_exc()
        sys.exit(errors.EXIT_BUG)
    sys.exit(errors.EXIT_OK)
