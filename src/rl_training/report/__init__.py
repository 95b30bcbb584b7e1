"""Pages about runs: the report and the live dashboard."""
