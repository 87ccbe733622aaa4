"""Memory and speed of the engine beside its peers: `lcsb bench memory`, `lcsb bench speed`."""
