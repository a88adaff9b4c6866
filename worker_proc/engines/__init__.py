"""The engines in plain torch, for models of ours and of transformers, and the choice of one."""
