"""hfgen side by side with upstream, one file per question; ``make bench`` runs them."""
