"""A Plan inside PyTorch."""
