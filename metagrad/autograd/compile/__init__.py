"""Compiling functions by torch.compile, with eager code as fallback."""
