"""`quadriga replay`: a request of a journal is computed again, and its tokens are compared."""
