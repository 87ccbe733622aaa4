"""The commands of `lcsb`, by what they work on; `lcsb/cli.py` puts them together."""
