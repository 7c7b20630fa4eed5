"""Pages to look at runs: one self-contained file, or the same from a loopback server. Nothing here needs torch."""
