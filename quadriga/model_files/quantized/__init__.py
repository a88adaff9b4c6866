"""Read how a quantized checkpoint stores its weights, without torch."""
