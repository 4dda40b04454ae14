"""The algorithms of the literature, each a constructor that reads as its paper defines it."""
