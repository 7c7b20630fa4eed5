"""Several methods joined into one answer: recipes, the demo, pre-training of the shipped models."""
