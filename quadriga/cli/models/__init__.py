"""`quadriga models`: the models of this machine, and whether one can be served."""
