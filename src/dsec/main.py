"""The command line ``dsec``.

Exit codes: 0 success, 1 an error (one line on stderr says what to do), 2 wrong usage; ``exec``,
``shell`` and ``run COMMAND`` end with the command's own code, 128 + signal, or 124 for a timeout.
"""

from __future__ import annotations

import click

from dsec import (
    audit,
    completion,
    copy,
    display,
    execute,
    fncall,
    host,
    layer,
    pausing,
    policy,
    sandboxes,
    top,
    verify,
)
from dsec.session import Settings
from libdsec import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--endpoint",
    metavar="ENDPOINT",
    envvar="DSEC_ENDPOINT",
    help="unix:/path, tcp://host:port or tls://host:port (DSEC_ENDPOINT).",
)
@click.option("--token", metavar="TOKEN", envvar="DSEC_TOKEN", help="For TCP (DSEC_TOKEN).")
@click.option(
    "--ca-file",
    metavar="FILE",
    envvar="DSEC_CA_FILE",
    help="Authorities to trust for TLS (DSEC_CA_FILE).",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@click.version_option(__version__, prog_name="dsec")
@click.pass_context
def cli(
    context: click.Context,
    endpoint: str | None,
    token: str | None,
    ca_file: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Sandboxes for AI agents on this host."""
    context.obj = Settings(endpoint=endpoint, token=token, ca_file=ca_file, json=as_json)


for _command in (
    host.check, sandboxes.run, sandboxes.ps, execute.exec_, execute.shell, copy.copy, execute.logs,
    display.display, host.stats, top.top, host.events, sandboxes.stop,
    pausing.pause, pausing.resume, pausing.class_, fncall.fncall,
    layer.layer, layer.pack, policy.policy, audit.audit,
    completion.completion, host.version, verify.verify, verify.verify_record, verify.verify_key,
):  # fmt: skip
    cli.add_command(_command)


def main() -> None:
    """Entry of the console script."""
    cli(prog_name="dsec")
