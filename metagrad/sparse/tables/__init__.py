"""Embedding tables: lookups, row-sparse gradients, and tables that are replaced by some of their rows."""
