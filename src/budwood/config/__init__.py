"""Settings of every verb: one small frozen class each, shared by Python, YAML and the command line."""
