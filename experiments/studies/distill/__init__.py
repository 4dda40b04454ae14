"""Data set distillation: a few images, learned so that a network trained on them does well on all others."""
