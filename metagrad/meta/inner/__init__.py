"""The inner loop: gradient steps on the support examples of a task, differentiable."""
