"""A GGUF's header: its reader, and what is made of single kinds of metadata."""
