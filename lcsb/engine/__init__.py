"""The memory engine: MeBP on packed 4-bit weights that stay on disk, one layer and one tile at a time.

Of the large libraries it imports torch alone.
"""
