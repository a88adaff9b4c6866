"""Responses in the background: they are made without a client, also after the gateway's death."""
