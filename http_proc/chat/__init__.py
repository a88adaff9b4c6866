"""Chats in the gateway's own terms: every API converts its requests to these and back."""
