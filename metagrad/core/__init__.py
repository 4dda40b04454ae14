"""What every folder uses: trees, substitution of parameters, captured state, the private names of torch."""
