"""Rows of text with stable ids: tasks, readers, prompts, encoders and batches."""
