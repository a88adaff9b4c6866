"""Read checkpoints into models, and split weights over tensor parallel ranks."""
