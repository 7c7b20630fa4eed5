"""Grafts: which few weights of a fine-tuned model hold its skill, cut out and put back."""
