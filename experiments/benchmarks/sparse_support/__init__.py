"""Which derivatives of sparse operations are right, torch's beside ours, each found by running it."""
