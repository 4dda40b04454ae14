"""Checks of derivatives: finite differences, the lint of recorded graphs, errors for missing derivatives."""
