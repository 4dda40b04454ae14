"""Models as chains of blocks, differentiated block by block."""
