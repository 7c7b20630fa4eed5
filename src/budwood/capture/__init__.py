"""What a pass through a model leaves behind: activations, per-example gradients, and sums of them."""
