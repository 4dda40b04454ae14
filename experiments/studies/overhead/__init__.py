"""What an order of differentiation costs in memory and time, and what each remedy buys."""
