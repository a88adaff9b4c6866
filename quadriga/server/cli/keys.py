"""`quadriga keys`: API keys of tenants, in the file of --keys."""

import argparse
from pathlib import Path
from typing import Any

NAME = "keys"
HELP = "make, list and remove API keys of tenants; see docs/tenants.md"
LIMITS = ("max_open_requests", "requests_per_minute", "tokens_per_minute", "max_files_bytes")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
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
