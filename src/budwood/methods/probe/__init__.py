"""Probes on every layer: label, token and span probes with their controls."""
