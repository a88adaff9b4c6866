"""What models are written in: layers, operations, attention; and the decoder."""
