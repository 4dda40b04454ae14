"""What can be known of a training before it begins: which derivatives are right, and what a step costs in memory."""
