"""Embedding tables: looking rows up, their sparse cotangents, and tables that are replaced by rows."""
