"""The inner loop: differentiable gradient steps on the support examples of a task."""
