"""Where models come from: directories, GGUF files, the Hub, the built-in one, random weights."""
