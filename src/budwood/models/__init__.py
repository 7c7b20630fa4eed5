"""Models: references, loading and saving, the places inside them, and what they are asked."""
