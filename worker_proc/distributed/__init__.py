"""Tensor parallel ranks: how they are started, meet, and add up their parts."""
