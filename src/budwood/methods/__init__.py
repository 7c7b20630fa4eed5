"""Methods: each a function from models, rows and settings to a result."""
