"""The benchmark of the host's part of eager calls."""
