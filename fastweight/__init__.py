"""Fast-weight attention for PyTorch."""
