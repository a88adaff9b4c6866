"""Sample tokens: logits processors, grammar masks and the draw itself."""
