"""Sample tokens: logits processors, grammars masks and the draw itself."""
