"""Runs and artefacts on disk: written whole or not at all, found again by their settings."""
