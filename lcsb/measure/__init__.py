"""The measure stage: gradient fidelity, seconds by part, and peak memory of this model on this machine."""
