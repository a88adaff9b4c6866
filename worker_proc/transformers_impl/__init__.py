"""Run the models of the package transformers over KV pages, for families without a native file."""
