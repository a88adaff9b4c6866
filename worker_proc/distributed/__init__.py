"""Tensor parallel ranks: the process group, the leader and the followers."""
