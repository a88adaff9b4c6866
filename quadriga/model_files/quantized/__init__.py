"""Read how a quantised checkpoint stores its weights, without torch."""
