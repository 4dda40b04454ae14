"""What a step of an optimizer costs, in gradients."""
