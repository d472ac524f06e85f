"""Reading checkpoints: shards, tensors that stay on disk, models larger than memory."""
