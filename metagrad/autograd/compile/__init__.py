"""What torch.compile is asked for, and the eager fallback."""
