"""The benchmark of attention."""
