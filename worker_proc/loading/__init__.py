"""Read checkpoints and shard weights over tensor parallel ranks."""
