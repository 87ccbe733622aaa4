"""Tasks: what a model is trained on and scored by. Rows of data (sources), what is asked in them (formats), tokens and
targets (encoding), and the tasks by name (load).
"""
