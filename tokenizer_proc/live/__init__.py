"""The live feed at the frontend: who watches, and what the server's processes use."""
