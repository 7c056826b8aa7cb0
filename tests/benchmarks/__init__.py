"""What protection costs, as ratios to floors of the same run."""
