"""The benchmark of the rotation."""
