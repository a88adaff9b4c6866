"""Sources of models: directories, GGUF files, the Hub, the built-in model, random weights."""
