"""Choose what runs a model: a native file of the worker, or the package transformers."""
