"""The page, as the gateway serves it."""
