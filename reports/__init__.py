"""Run folders, claims, verdicts and the report page: everything that can be said of a run from its files."""
