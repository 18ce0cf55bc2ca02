"""The benchmark of training steps."""
