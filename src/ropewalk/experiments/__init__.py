"""Experiments: models small enough to train here, built on Ropewalk's modules."""
