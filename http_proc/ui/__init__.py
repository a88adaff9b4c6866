"""The page at /: its sources, the bundle that is made of them, and how it is served."""
