"""Which derivatives are right: finite differences, the lint of recorded graphs, errors for missing derivatives."""
