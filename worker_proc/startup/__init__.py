"""The start of the worker: build the runner, size the KV pool, tune the prefill."""
