"""`quadriga keys`: API keys of tenants. `quadriga keygen`: keys of the public socket."""

import argparse
from pathlib import Path
from typing import Any

LIMITS = ("max_open_requests", "requests_per_minute", "tokens_per_minute", "max_files_bytes")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `quadriga keys`."""
    actions = parser.add_subparsers(title="actions", required=True)
    add = actions.add_parser("add", help="add a tenant, and print its key once")
    add.add_argument("name", metavar="NAME")
    add.add_argument("--weight", type=float, metavar="FACTOR", help="share of the server")
    add.add_argument("--priority", nargs=2, type=int, metavar=("MIN", "MAX"), help="allowed range")
    for name in LIMITS:
        add.add_argument("--" + name.replace("_", "-"), type=int, metavar="N")
    add.add_argument("--models", nargs="+", metavar="MODEL", help="models that it may use")
    add.add_argument("--sub-tenants", action="store_const", const=True, help="allow users")
    add.add_argument("--cache", choices=("shared", "own"), help="own: keep its prefixes apart")
    show = actions.add_parser("list", help="show the tenants; keys are not kept")
    remove = actions.add_parser("remove", help="remove a tenant; its key is refused at once")
    remove.add_argument("name", metavar="NAME")
    for action, run_it in ((add, _add), (show, _list), (remove, _remove)):
        action.add_argument("--keys", type=Path, required=True, metavar="FILE", dest="file")
        action.set_defaults(act=run_it)


def run(arguments: argparse.Namespace) -> None:
    """Run the action."""
    arguments.act(arguments)


def _add(arguments: argparse.Namespace) -> None:
    from quadriga.server.tenants import add_tenant

    names = ("weight", "priority", *LIMITS, "models", "sub_tenants", "cache")
    values: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    given = {name: value for name, value in values.items() if value is not None}
    key = add_tenant(arguments.file, arguments.name, given)
    print(f"key of {arguments.name}, which is shown only now: {key}", flush=True)


def _list(arguments: argparse.Namespace) -> None:
    from quadriga.server.tenants import KNOWN_FIELDS, Tenant, read_tenants

    plain = Tenant(name="")
    for tenant in read_tenants(arguments.file):
        parts = [
            f"{field} {_text(getattr(tenant, field))}"
            for field in KNOWN_FIELDS
            if field not in ("name", "key") and getattr(tenant, field) != getattr(plain, field)
        ]
        print(" · ".join([tenant.name, *parts]))


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _remove(arguments: argparse.Namespace) -> None:
    from quadriga.server.tenants import remove_tenant

    remove_tenant(arguments.file, arguments.name)
    print(f"removed {arguments.name} from {arguments.file}", flush=True)


# --- keys of a public socket that other machines reach --------------------------------------------


def add_keygen_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `quadriga keygen`."""
    parser.add_argument("directory", type=Path, help="the server's keys: its --curve-dir")
    parser.add_argument("clients", nargs="*", metavar="NAME", help="make keys for this client")


def run_keygen(arguments: argparse.Namespace) -> None:
    """Make keys and print what to do with them."""
    from quadriga.wire import curve

    directory: Path = arguments.directory
    if curve.make_server_keys(directory):
        start = f"start it with --curve-dir {directory}"
        print(f"the server's keys are in {directory}: {start}", flush=True)
    for name in arguments.clients:
        hand_out = curve.make_client_keys(directory, name)
        print(
            f"give {hand_out} to {name} over a confidential channel;"
            f" remove {directory / curve.ALLOWED / name}.key to revoke it",
            flush=True,
        )
