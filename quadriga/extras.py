"""The command that installs an optional dependency, as error messages name it."""

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def install_command(extra: str) -> str:
    """Return the pip command that installs an extra: into a checkout, or from the package."""
    package = "-e '.[{}]'" if CHECKOUT.exists() else "'quadriga[{}]'"
    return f"pip install {package.format(extra)}"
