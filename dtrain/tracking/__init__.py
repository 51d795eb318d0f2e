"""What a run reports: metrics and the places that they go to."""
