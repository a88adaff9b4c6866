"""The config of a server that a deployment file starts."""

import argparse

from quadriga.server.config import server_config as configuration
from quadriga.server.config.server_config import ServerConfig


def parse(argv: list[str]) -> ServerConfig:
    """Return the validated config of a command line."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    configuration.add_flags(parser)
    config = configuration.from_namespace(parser.parse_args(argv))
    config.validate()
    return config
