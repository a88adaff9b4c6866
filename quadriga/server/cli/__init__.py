"""The command `quadriga`: chat, ask and keygen, and the dispatch of serve and bench."""
