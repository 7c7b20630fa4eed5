"""Lists of idempotent jobs, each of which writes one file."""
