"""The start of the worker: import torch, build the runner, size the KV pool, tune the prefill."""
