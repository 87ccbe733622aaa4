"""Vectorised experiments on problems small enough to check the theory exactly; one file per experiment."""
