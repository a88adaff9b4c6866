"""The command `quadriga`: its subcommands, and the dispatch of serve, bench and replay."""
